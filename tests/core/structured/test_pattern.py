"""Patterns: what is read, how it is written for XGrammar, and what is refused by name.

The oracles are Python's ``re``, and Node's regular expressions where Node is installed.
"""

import json
import re
import shutil
import subprocess
import sys
import unicodedata
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.structured.code_points import complement, escapes, intersection, union
from minisgl.structured.pattern import MAX_RANGES, any_text, translate
from minisgl.structured.pattern_reader import MAX_NESTING, MAX_REPEAT
from support.examples import scaled

TELLING = (
    "aZ_-09 .^$]\\\"'{}|é²ª٣\t\n\r\v\x1c\x85\xa0"
    "\u180e\u2028\u2029\u3000\ufeff\ufffd🎉\x00\U0010ffff"
)
"""Characters that engines take for different things."""

NODE = shutil.which("node")


def written(pattern: str, *, in_string: bool = False) -> re.Pattern[str]:
    """What is written for XGrammar, as Python's ``re`` reads it: no class of it has a name."""
    text = translate(pattern, in_string=in_string)
    assert not re.search(r"\\[^u]|\[\^|\.|\\u[^{]|[$]", text)
    return re.compile(re.sub(r"\\u\{(\w+)\}", lambda code: f"\\U{int(code[1], 16):08x}", text))


def matching(pattern: str, *, in_string: bool = False) -> set[str]:
    """The telling characters that a pattern of one character lets through."""
    compiled = written(pattern, in_string=in_string)
    return {one for one in TELLING if compiled.fullmatch(one)}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d", "09"),  # of ECMA-262: ASCII
        (r"\w", "aZ_09"),
        (r"\s", " \t\n\r\v\xa0\u2028\u2029\u3000"),  # no \ufeff (Python), no \x1c, \x85 (ECMA)
        (r"[\d\s]", "09 \t\n\r\v\xa0\u2028\u2029\u3000"),
        (r"[\w.-]", "aZ_09.-"),
        (r"[a-zé]", "aé"),
        (r"[\]^-]", "]^-"),
        (r"[\x41-Z\u00e9\u{1f389}\U0001F389]", "Zé🎉"),
        (r"[\b\0]", "\x00"),
        (r"\t", "\t"),
        (r"\.", "."),
        (r"\$", "$"),
        (r"\\", "\\"),
        (r"\'", "'"),
        (r"\-", "-"),
        (r"\é", "é"),
        ("[{]", "{"),
        ("{", "{"),
        ("}", "}"),
        ("]", "]"),
        ("🎉", "🎉"),
        (r"[\n-\r]", "\n\v\r"),
    ],
)
def test_a_character_is_what_both_readings_let_through(pattern: str, expected: str) -> None:
    assert matching(pattern) == set(expected)


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        (".", "\n\r\u2028\u2029"),
        (r"\D", "09٣"),  # of Python: all of Unicode
        (r"\W", "aZ_09é²ª٣\u180e\ufeff\ufffd"),  # three in ranges that are not wide
        (r"[^\w]", "aZ_09é²ª٣\u180e\ufeff\ufffd"),
        (r"\S", " \t\n\r\v\x1c\x85\xa0\u2028\u2029\u3000\ufeff"),
        (r"[^\s]", " \t\n\r\v\x1c\x85\xa0\u2028\u2029\u3000\ufeff"),
        (r"[^\S\d]", set(TELLING) - set(" \t\n\r\v\xa0\u2028\u2029\u3000")),
        (r"[^a]", "a"),
        (r"[^a-z\n]", "a\n"),
        (r"[\s\S]", ""),
        (r"[\D\d]", ""),
        (r"[^^\]-]", "^]-"),
    ],
)
def test_so_is_a_negated_one(pattern: str, left_out: str) -> None:
    assert set(TELLING) - matching(pattern) == set(left_out)


@pytest.mark.parametrize("pattern", [".", r"\D", r"\W", r"\S", "[^a]", r"[\s\S]"])
def test_no_class_has_surrogates_and_no_string_what_json_escapes(pattern: str) -> None:
    compiled = written(pattern)
    assert not any(compiled.fullmatch(chr(one)) for one in range(0xD800, 0xE000))
    inside = matching(pattern, in_string=True)
    assert inside == matching(pattern) - set('"\\\t\n\r\v\x1c\x00')


def test_a_class_of_very_many_ranges_keeps_the_widest_and_latin() -> None:
    text = translate(r"\W", in_string=False)
    assert text.count("-") <= MAX_RANGES + 20
    compiled, whole = written(r"\W"), re.compile(r"\W")
    assert all(bool(compiled.match(chr(i))) == bool(whole.match(chr(i))) for i in range(256))
    assert compiled.match("🎉")
    assert not any(
        compiled.match(chr(i)) and not whole.match(chr(i)) for i in range(sys.maxunicode + 1)
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ""),
        ("^hello$", "hello"),
        ("^", ""),
        ("^$", ""),
        ("a|b|", "(?:a|b|)"),
        ("^a$|^b$", "(?:a|b)"),
        ("(?:^|,)x(?:,|$)", r"(?:|\u{2c})x(?:\u{2c}|)"),
        ("(a)(?:b)(?P<c>c)(?<d>d)", "abcd"),
        ("(ab)*c+d?", "(?:ab)*c+d{0,1}"),
        ("a*?b+?c??d{2}?", "a*b+c{0,1}d{2,2}"),
        ("a{2,}b{0,3}(?:c|d){1,2}", "a{2,}b{0,3}(?:(?:c|d)){1,2}"),
        ("a{0}b", "b"),
        ("(a){1}", "a"),
        ("(^a)?", "a{0,1}"),
        ("()*a", "a"),
        ("(a*)*", "a*"),
        ("(a+){3,}", "a{3,}"),
        ("(a{2,})*", "(?:a{2,})*"),
        ("(a|)*", "(?:(?:a))*"),
        ("(a?b?){2,3}", "(?:(?:ab{0,1}|b)){0,3}"),
        ("(a?|b*|)+", "(?:(?:a|b+))*"),
        ("((|())*|)?", ""),
        ("[_^]", r"[\u{5f}\u{5e}-\u{5f}]"),
        (r"[\^a]", r"[a\u{5e}a]"),
        (r"\^", r"\u{5e}"),
        ("a{b", r"a\u{7b}b"),
        ("x-y", r"x\u{2d}y"),
    ],
)
def test_the_rest_is_written_in_few_words(pattern: str, expected: str) -> None:
    assert translate(pattern, in_string=True) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)", "a look-ahead near position 1"),
        ("(?!a)", "a look-ahead"),
        ("(?<=a)", "a look-behind"),
        (r"\\(?<!a)", "a look-behind near position 3"),
        ("(?i)a", "a flag"),
        ("(?i:a)", "a flag"),
        ("(?>a)", "an atomic group"),
        ("(?(1)a)", "a condition"),
        ("(?#a)", "a comment"),
        (r"(a)\1", "a backreference"),
        (r"(?<n>a)\k<n>", "a backreference"),
        ("(?P<n>a)(?P=n)", "a backreference"),
        (r"\bfoo", "a word boundary"),
        (r"a\B", "a word boundary"),
        (r"\Aa\Z", "an anchor other than"),
        (r"\p{L}", "a Unicode property"),
        (r"[\p{L}]", "a Unicode property"),
        (r"\e", r"the escape '\e'"),
        (r"[\A]", "an anchor other than"),
        (r"\01", r"the escape '\0'"),
        (r"\x4", r"the escape '\x'"),
        ("a\\", "ends inside of an escape"),
        ("a^b", "'^' with something before it"),
        ("a?^b", "'^' with something before it"),
        ("(a|^)*", "'^' with something before it"),
        ("(?:a$|b)c", "'$' with something behind it"),
        (r"a$\n?", "'$' with something behind it"),
        ("^*", "a repeated anchor"),
        ("(^)*a", "a repeated anchor"),
        ("*", "a repetition of nothing near position 0"),
        ("a|+", "a repetition of nothing"),
        ("({2})", "a repetition of nothing"),
        ("a**", "a repetition of a repetition"),
        ("a{2}{3}", "a repetition of a repetition"),
        ("a*+", "a possessive repetition"),
        ("a{,3}", "write {0,...}"),
        ("a{3,1}", "whose maximum is below its minimum"),
        (f"a{{{MAX_REPEAT + 1}}}", f"a repetition beyond {MAX_REPEAT}"),
        ("a{1,9999999999}", f"a repetition beyond {MAX_REPEAT}"),
        ("(a", "a '(' that is not closed"),
        ("a)", "a ')' without its '('"),
        ("[a", "ends inside of a class"),
        ("[a-", "ends inside of a class"),
        ("[]a]", r"write '\]'"),
        ("[^]", r"write '\]'"),
        ("[z-a]", "whose end is before its beginning"),
        (r"[a-\d]", "with a class at its end"),
        (r"[\d-z]", "with a class at its end"),
        (r"[^\s\S]", r"has '[^\\s\\S]', which no character matches"),
        (r"\ud83d\ude00", "half of a surrogate pair"),
        ("\ud800", "half of a surrogate pair"),
        (r"\u{110000}", "the code u{110000} of no character"),
        ("(" * (MAX_NESTING + 1) + ")" * (MAX_NESTING + 1), "nested deeper than 100"),
        ("(" * 100_000, "nested deeper than 100"),
    ],
)
def test_what_engines_read_differently_or_xgrammar_cannot_is_refused(
    pattern: str, message: str
) -> None:
    for in_string in (False, True):
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            translate(pattern, in_string=in_string)
        assert str(refused.value).startswith("the pattern '")


@pytest.mark.parametrize(
    "pattern", ['say "a"', r"a\nb", r"a\\b", '["]', r'["\\]', r"[\x00-\x1f]", r'a"?', "\t"]
)
def test_what_json_must_escape_is_refused_where_nothing_else_can_come(pattern: str) -> None:
    translate(pattern, in_string=False)
    with pytest.raises(ValueError, match="asks for a quote, a backslash or a control character"):
        translate(pattern, in_string=True)


def test_strings_of_some_length() -> None:
    for one in (any_text(2, 4), any_text(2, None)):
        assert one.startswith(translate(r"[\s\S]", in_string=True))
    assert any_text(2, 4).endswith("]{2,4}")
    assert any_text(2, None).endswith("]{2,}")


ATOMS = st.sampled_from([
    "a", "b", "é", "-", ".", "🎉", " ", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[ab]", "[^a]",
    r"[^\s\d]", r"[\w-]", r"[^\W_]", r"[\s\S]", "[a-c0-9]", r"\x20", r"\u00e9", r"\/", "[$^.]",
    "()",
])  # fmt: skip
QUANTIFIERS = st.sampled_from(["", "", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{0,1}", "{1,}"])


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(parts, max_size=3)
    groups = st.sampled_from(["(?:{})", "({})"])
    return st.builds(
        lambda group, items, mark, by: group.format(by.join(items)) + mark,
        groups, several, QUANTIFIERS, st.sampled_from(["", "|"]),
    )  # fmt: skip


def is_quick(pattern: str) -> bool:
    """Say whether engines that go back can match it: with many repetitions they take for ever."""
    return len(re.findall(r"(?<!\()[*+?]|\{", pattern)) <= 4


PATTERNS = st.recursive(st.builds("{}{}".format, ATOMS, QUANTIFIERS), joined, max_leaves=6).filter(
    is_quick
)
TEXTS = [one + other for one in ("", *TELLING) for other in ("", *TELLING)]


@given(PATTERNS, st.booleans())
def test_whatever_the_written_pattern_matches_pythons_re_matches(
    pattern: str, in_string: bool
) -> None:
    """Catches: groups that fall apart, repetitions of the wrong thing, classes that are wide."""
    compiled = written(pattern, in_string=in_string)
    for text in filter(compiled.fullmatch, TEXTS):
        assert re.fullmatch(pattern, text)
        assert not in_string or json.loads(f'"{text}"') == text


PLAIN = st.recursive(
    st.builds("{}{}".format, st.sampled_from(["a", "b", "[ab]", "[^a]", "ab", "()"]), QUANTIFIERS),
    joined,
    max_leaves=8,
).filter(is_quick)


PLAIN_TEXTS = ["".join(one) for n in range(5) for one in product("abc", repeat=n)]


@given(PLAIN)
def test_what_all_engines_read_alike_is_written_exactly(pattern: str) -> None:
    """Catches: alternatives or repetitions that get lost."""
    compiled = written(pattern)
    for text in PLAIN_TEXTS:
        assert bool(compiled.fullmatch(text)) == bool(re.fullmatch(pattern, text))


NODE_SCRIPT = """
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
const results = cases.map(([pattern, text]) => new RegExp(`^(?:${pattern})$`, "u").test(text));
console.log(JSON.stringify(results));
"""


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
@given(st.data())
@settings(max_examples=scaled(20))  # an example starts a process, and draws thirty
def test_whatever_the_written_pattern_matches_ecmascript_matches(data: st.DataObject) -> None:
    """Catches: classes that are as Python reads them."""
    assert NODE is not None
    cases = []
    for pattern in data.draw(st.lists(PATTERNS, min_size=30, max_size=30)):
        cases += [(pattern, text) for text in filter(written(pattern).fullmatch, TEXTS)]
    command, stdin = [NODE, "-e", NODE_SCRIPT], json.dumps(cases)
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=True)
    failed = [case for case, ok in zip(cases, json.loads(done.stdout), strict=True) if not ok]
    assert not failed


RANGES = st.lists(
    st.tuples(st.integers(0, 0xD7F0), st.integers(0, 9)).map(lambda one: (one[0], sum(one))),
    max_size=5,
).map(lambda ranges: union(tuple(ranges)))


@given(RANGES, RANGES)
def test_sets_of_ranges_are_sets(one: tuple, other: tuple) -> None:
    def members(ranges: tuple) -> set[int]:
        return {i for first, last in ranges for i in range(first, last + 1)}

    assert members(union(one, other)) == members(one) | members(other)
    assert members(intersection(one, other)) == members(one) & members(other)
    assert complement(complement(one)) == one
    for ranges in (union(one, other), intersection(one, other), complement(one)):
        assert all(
            last + 1 < first
            for (_, last), (first, _) in pairwise(ranges)
            if (last, first) != (0xD7FF, 0xE000)
        )


def test_pythons_escapes_are_those_of_its_tables() -> None:
    def pythons(name: str) -> set[str]:
        return {chr(i) for first, last in escapes()[name][1] for i in range(first, last + 1)}

    digits, spaces = pythons("d"), pythons("s")
    assert digits & set(TELLING) == set("09٣")
    assert all(unicodedata.category(one) == "Nd" for one in digits)
    assert spaces & set(TELLING) == {one for one in TELLING if one.isspace()}
