"""The tables of RESULTS.md, made from the records in ``results`` and from ``rivals.json``.

``python benchmarks/results_table.py`` rewrites the document; a test compares the two.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from minisgl.benchmark.workload import PRESETS
from minisgl.plugins.measurements import MeasuredCell, scores

HERE: Final = Path(__file__).parent
DOCUMENT: Final = HERE / "RESULTS.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
CARD: Final = "H200"
"""Only runs on this card are compared with the others' figures."""

_KERNELS_SHOWN: Final = 10

_OF_ANY_RUN: Final = ("model.", "backend_options.")
"""Settings of a run that say which model, and how a backend does what it would do anyway."""

Record = Mapping[str, Any]


def read_records(folder: Path) -> dict[str, Record]:
    """Return every record of a folder by its file's name, oldest first."""
    records = {
        file.name: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.glob("*.json"))
    }
    return dict(sorted(records.items(), key=lambda item: str(item[1]["date"])))


def render(records: Mapping[str, Record], rivals: Mapping[str, Any]) -> str:
    """Return all tables as Markdown."""
    parts = []
    if not records:
        parts.append("Nothing of minisgl has been measured yet.\n")
    parts.append(_comparison(list(records.values()), rivals))
    offline = {name: one for name, one in records.items() if one["benchmark"] == "offline"}
    if offline:
        parts += ["## Runs\n", _runs(offline)]
        parts += [_step(name, one) for name, one in offline.items() if _has_steps(one)]
    for name, record in records.items():
        if record["benchmark"] == "attention":
            parts += [_attention(name, record, rivals["attention"]), _attention_ranks(record)]
    for name, record in records.items():
        if record["benchmark"] == "moe_layers":
            parts.append(_moe_layers(name, record, rivals["moe"]))
    for name, record in records.items():
        if record["benchmark"] == "kernels":
            parts.append(_kernels(name, record))
    return "\n".join(parts)


def with_tables(document: str, tables: str) -> str:
    """Return the document with its tables replaced."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables}\n{END}{tail}"


def check_record(record: Record) -> None:
    """Recompute what a record says about itself from its rounds, or from its times.

    Raises:
        ValueError: a figure does not follow from the others.
    """
    if record["benchmark"] == "attention":
        for cell in record["cells"]:
            _check_cell(cell, record["ceilings"])
    if record["benchmark"] != "offline":
        return
    rates = []
    for one in record["rounds"]:
        rate = one["num_output_tokens"] / one["seconds"]
        _expect(one["tokens_per_second"], rate, f"seed {one['seed']}")
        if one["counts"]:
            rates.append(rate)
    _expect(record["tokens_per_second"], median(rates), "the median")


def _check_cell(cell: Mapping[str, Any], ceilings: Mapping[str, float]) -> None:
    if cell["us"] is None:
        return
    case = f"{cell['case']} of {cell['backend']}"
    most = ceilings["read_bytes_per_s" if cell["phase"] == "decode" else "flops_per_s"]
    # Both are rounded: times to a nanosecond, fractions to four digits.
    if abs(cell["us"] - median(cell["times_us"])) > 0.001:
        raise ValueError(f"{case}: the record says {cell['us']} us, not the median of its times")
    if abs(cell["fraction"] - cell["rate"] / most) > 0.0001:
        raise ValueError(f"{case}: the record says {cell['fraction']} of the most, its rate not")


def _expect(found: float, computed: float, what: str) -> None:
    if abs(found - computed) > 1e-6 * computed:
        raise ValueError(f"{what}: the record says {found}, its rounds give {computed}")


def _comparison(records: Sequence[Record], rivals: Mapping[str, Any]) -> str:
    systems = rivals["systems"]
    heads = [f"{name} {version}" for name, version in systems.items()]
    lines = [["what", "unit", *heads, "floor", "must", "reach", "minisgl", "median", "verdict"]]
    for row in rivals["rows"]:
        ours, figure = _ours(row, records)
        theirs = [_numbers(row["systems"].get(name, ())) for name in systems]
        wanted = [_numbers(row["floor"]), _number(row["must"]), _number(row["reach"])]
        shown = "-" if figure is None else _number(figure)
        found = [_numbers(ours), shown, _verdict(row, figure)]
        lines.append([row["title"], row["unit"], *theirs, *wanted, *found])
    note = (
        f"The other systems were measured on {rivals['measured_on']}. Two numbers are those of "
        "seeds 1 and 2; `must` and `reach` are for the median.\n"
    )
    return f"{note}\n{_table(lines)}"


def _ours(row: Mapping[str, Any], records: Sequence[Record]) -> tuple[list[float], float | None]:
    """Return our numbers for a row, one a seed if it has them, and the one that is judged."""
    kind: str = row["kind"]
    fitting = [one for one in records if _fits(one, row)]
    if not fitting:
        return [], None
    latest = fitting[-1]
    if kind == "startup":
        ready: float = latest["startup"]["process_to_ready_s"]
        return [], ready
    if kind == "idle":
        return [], _idle(latest["profile"])
    counted = [one for one in latest["rounds"] if one["counts"]]
    return [one["tokens_per_second"] for one in counted], latest["tokens_per_second"]


def _fits(record: Record, row: Mapping[str, Any]) -> bool:
    """Return whether a record has a figure for a row."""
    if record["benchmark"] != "offline" or CARD not in record["device"]["name"]:
        return False
    if (record["model"], record["preset"]) != (row["model"], row["preset"]):
        return False
    known = {*PRESETS[row["preset"]].settings}
    about = [name for name in record["settings"] if not name.startswith(_OF_ANY_RUN)]
    if not known.issuperset(about):
        return False  # a run about a setting of its own
    installed = record.get("versions", {})
    if row.get("has", "python") not in installed or row.get("lacks") in installed:
        return False
    if row["kind"] == "startup":
        return record["startup"]["process_to_ready_s"] is not None
    if row["kind"] == "idle":
        profile = record["profile"]
        # All requests must still run: the row says how many.
        return (
            profile is not None
            and _idle(profile) is not None
            and profile["num_running"] == record["workload"]["num_prompts"]
        )
    return True


def _idle(profile: Mapping[str, Any]) -> float | None:
    """Return the pause between decode graphs: by events if they were taken, else by the trace."""
    pause: float | None = profile.get("pause_median_us")
    idle: float | None = profile["trace"]["idle_median_us"]
    return idle if pause is None else pause


def _verdict(row: Mapping[str, Any], figure: float | None) -> str:
    if figure is None:
        return "not measured"
    higher_is_better = row["kind"] == "speed"
    for name in ("reach", "must"):
        if figure >= row[name] if higher_is_better else figure <= row[name]:
            return "reached" if name == "reach" else "must holds"
    return "misses must"


def _runs(records: Mapping[str, Record]) -> str:
    lines = [["file", "date", "device", "commit", "command", "tok/s by seed", "median", "ready, s"]]
    for name, record in records.items():
        by_seed = ", ".join(
            f"{one['seed']}: {_number(one['tokens_per_second'])}" for one in record["rounds"]
        )
        ready = record["startup"]["process_to_ready_s"]
        lines.append(
            [
                f"[{name}](results/{name})",
                record["date"][:10],
                record["device"]["name"],
                str(record["commit"])[:12],
                f"`{record['command']}`",
                by_seed,
                _number(record["tokens_per_second"]),
                "-" if ready is None else f"{ready:.1f}",
            ]
        )
    return _table(lines)


def _has_steps(record: Record) -> bool:
    profile = record.get("profile")
    return profile is not None and "kernels" in profile["trace"]


def _step(name: str, record: Record) -> str:
    """Say where the time of a decode step goes, by the profile of a run."""
    trace, rows = record["profile"]["trace"], record["profile"]["num_running"]
    period = trace["period_median_us"]
    lines = [["kernel", "calls a step", "us a step", "of the step"]]
    for kernel in trace["kernels"][:_KERNELS_SHOWN]:
        short = kernel["name"].replace("(anonymous namespace)::", "").removeprefix("void ")
        short = short.split("<")[0].split("(")[0]
        share = kernel["us"] / period
        lines.append(
            [f"`{short}`", _number(kernel["calls"]), f"{kernel['us']:.1f}", f"{share:.1%}"]
        )
    return (
        f"## A decode step of {record['model']} with {rows} row{'' if rows == 1 else 's'}\n\n"
        f"From [{name}](results/{name}), medians: {_number(period)} us from start to start, of "
        f"which {_number(trace['gaps_in_step_us'])} us between kernels and "
        f"{_number(trace['idle_median_us'])} us between steps{_unslowed(record['profile'])}. "
        f"Kernels may overlap at their ends.\n\n"
        f"{_table(lines)}"
    )


def _unslowed(profile: Mapping[str, Any]) -> str:
    """Say what is left between steps where no profiler slows the host down."""
    pause = profile.get("pause_median_us")
    return "" if pause is None else f" (without the profiler {_number(pause)} us)"


def _kernels(name: str, record: Record) -> str:
    ceilings = record["ceilings"]
    lines = [["case", "by", "us", "GB/s", "TFLOP/s", "of the most"]]
    for one in (*record["attention"], *record["ops"]):
        cells = [one["case"], one["implementation"]]
        if one["us"] is None:
            lines.append([*cells, "-", "-", "-", one["reason"]])
            continue
        moved = _number(one["rate"] / 1e9) if one["kind"] == "bytes" else "-"
        computed = _number(one["rate"] / 1e12) if one["kind"] == "flops" else "-"
        lines.append([*cells, f"{one['us']:.1f}", moved, computed, f"{one['fraction']:.0%}"])
    return (
        f"## Kernels on {record['device']['name']}, commit {str(record['commit'])[:12]}\n\n"
        f"[{name}](results/{name}): `{record['command']}`. The device reads "
        f"{_number(ceilings['read_bytes_per_s'] / 1e9)} GB/s (a reduction) and computes "
        f"{_number(ceilings['flops_per_s'] / 1e12)} TFLOP/s (a matrix product).\n\n{_table(lines)}"
    )


def _attention(name: str, record: Record, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the published cases of a run of the grid, each with the best backend's figure."""
    ceilings = record["ceilings"]
    lines = [["what", "unit", "must", "reach", "stretch", "minisgl", "by", "verdict"]]
    for row in rows:
        figure, best = _best(row, record["cells"])
        shown = ["-", "-"] if figure is None else [f"{figure:.3g}", best]
        verdict = _verdict({**row, "kind": "speed"}, figure)
        wanted = [f"{row[key]:g}" if key in row else "-" for key in ("must", "reach", "stretch")]
        lines.append([row["title"], row["unit"], *wanted, *shown, verdict])
    return (
        f"## Attention on {record['device']['name']}, commit {str(record['commit'])[:12]}\n\n"
        f"[{name}](results/{name}): `{record['command']}`, {record['seconds']:.0f} s. The device "
        f"reads {_number(ceilings['read_bytes_per_s'] / 1e9)} GB/s (a reduction) and computes "
        f"{_number(ceilings['flops_per_s'] / 1e12)} TFLOP/s (a matrix product). The figure is that "
        f"of the fastest backend and page size; TB/s are of K and V read.\n\n{_table(lines)}"
        f"{_picture(name)}"
    )


def _picture(name: str) -> str:
    """Show the heat map of a run, if it lies beside the record."""
    picture = Path(name).with_suffix(".png").name
    if not (HERE / "results" / picture).is_file():
        return ""
    return f"\n![who is fastest where, and how near to the ceiling](results/{picture})\n"


def _best(row: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """Return the best figure of any backend for a row, and by whom, at which page size.

    The rate, or how many times longer the best other backend takes for the cases of ``than``.
    """
    cells = [one for one in cells if one["part"] == "published"]
    best = min(_right(cells, row["cases"]), key=lambda one: one["us"], default=None)
    if best is None:
        return None, ""
    by = f"{best['backend'].rpartition(':')[2]}, page size {best['page_size']}"
    if "than" not in row:
        return best["rate"] / 1e12, by
    others = [one for one in cells if one["backend"] != best["backend"]]
    times = [one["us"] for one in _right(others, row["than"])]
    return (min(times) / best["us"], by) if times else (None, "")


def _right(cells: Sequence[Mapping[str, Any]], cases: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the cells of some cases, at any page size that is not given, whose result is right."""
    return [
        one
        for one in cells
        if one["status"] == "ok" and {one["case"], one["case"].rpartition(":")[0]} & {*cases}
    ]


def _attention_ranks(record: Record) -> str:
    """Return each backend's rank by phase, page size and heads."""
    cells = [msgspec.convert(one, MeasuredCell) for one in record["cells"] if one["part"] == "grid"]
    groups: dict[tuple[str, int, str], list[MeasuredCell]] = {}
    for cell in cells:
        heads = f"{cell.num_q_heads}/{cell.num_kv_heads}"
        groups.setdefault((cell.phase, cell.page_size, heads), []).append(cell)
    backends = sorted({cell.backend for cell in cells})
    lines = [["phase", "page size", "heads", *(one.rpartition(":")[2] for one in backends)]]
    for (phase, size, heads), of_group in sorted(groups.items()):
        found = scores(of_group)
        ranks = [f"{100 * found[one]:.0f}" if one in found else "-" for one in backends]
        lines.append([phase, str(size), heads, *ranks])
    return (
        "Ranks: the share of the fastest backend's speed in percent, as a geometric mean over "
        "rows and contexts, or over prompts. A dash: it cannot run that, or its results were "
        f"wrong.\n\n{_table(lines)}"
    )


def _moe_layers(name: str, record: Record, wanted: Mapping[str, Any]) -> str:
    """Return the times of a model's routed experts beside those of others, by number of tokens."""
    others = sorted({one for line in record["lines"] for one in line["others"]})
    heads = [f"{one}, us" for one in others]
    lines = [["tokens", "minisgl, us", "of the floor", "TFLOP/s", *heads, "verdict"]]
    for line in record["lines"]:
        floor_us = 1e6 * line["bytes"] / wanted["read_bytes_per_s"]
        times = [line["others"].get(one, {}).get("us") for one in others]
        shown = ["-" if one is None else f"{one:.1f}" for one in times]
        found = [f"{line['us']:.1f}", f"{floor_us / line['us']:.0%}"]
        computed = f"{line['flops'] / line['us'] / 1e6:.1f}"
        verdict = _moe_verdict(line, floor_us, wanted)
        lines.append([_number(line["tokens"]), *found, computed, *shown, verdict])
    dtype = " in fp8" if record["weights_dtype"] == "fp8" else ""
    beside = (
        " The others are given the chosen experts, and `published` their order too. To reach: "
        f"the time of the best of them, and {_wanted_shares(wanted)}."
    )
    return (
        f"## Routed experts of {record['model']}{dtype} on {record['device']['name']}, commit "
        f"{str(record['commit'])[:12]}\n\n"
        f"[{name}](results/{name}): `{record['command']}`. One layer, from router logits to the "
        f"sum of its experts; the floor is their weights, read once at "
        f"{wanted['read_bytes_per_s'] / 1e12:.2f} TB/s.{beside if others else ''}\n\n"
        f"{_table(lines)}"
    )


def _wanted_shares(wanted: Mapping[str, Any]) -> str:
    shares = wanted["of_the_floor"].items()
    return ", ".join(f"{share:.0%} of the floor with {tokens} tokens" for tokens, share in shares)


def _moe_verdict(line: Mapping[str, Any], floor_us: float, wanted: Mapping[str, Any]) -> str:
    """Judge a time by the best of the others, and by its share of the floor."""
    share = wanted["of_the_floor"].get(str(line["tokens"]))
    if share is not None and floor_us / line["us"] < share:
        return "misses reach"
    others = [one["us"] for one in line["others"].values()]
    if not others:
        return "nothing to compare"
    times = line["us"] / min(others)
    return "reached" if times <= 1 else f"{times:.2f} times the best"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def _numbers(values: Iterable[float | None]) -> str:
    """Write ``20,980 / 21,120``; what is missing is a dash."""
    return " / ".join("-" if value is None else _number(value) for value in values) or "-"


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = [
        [re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in line] for line in lines
    ]
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))


def main() -> None:
    records = read_records(HERE / "results")
    for record in records.values():
        check_record(record)
    rivals = json.loads((HERE / "rivals.json").read_text(encoding="utf-8"))
    text = with_tables(DOCUMENT.read_text(encoding="utf-8"), render(records, rivals))
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
