"""The wheels as users get them: what they hold, and that the core works without any other."""

import configparser
import email
import json
import zipfile
from importlib import import_module

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import AutoModelForCausalLM

import minisgl
from support.distributions import FOLDERS, ROOT, project
from support.reference import Tally, greedy
from support.tiny_models import EOS_TOKEN_IDS, write_tiny_model

CORE = "minisgl-core"
PLUGINS = [name for name in FOLDERS if name != CORE]
KERNELS = {"flashinfer-python", "flash-attn", "flash-attn-4", "triton"}


def import_name(folder: str) -> str:
    return "minisgl" if folder == CORE else folder.replace("-", "_")


def names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def read(wheel, ending: str) -> str:
    """Return the text of the one file of the wheel's metadata with this ending."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(f".dist-info/{ending}")]
        return archive.read(name).decode()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wheel_holds_the_sources_and_the_typing_marker(wheels, folder):
    package = ROOT / folder / "src" / import_name(folder)
    sources = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in names(wheels[folder]) if ".dist-info/" not in name}
    assert held == sources
    assert f"{package.name}/py.typed" in held


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wheel_holds_the_licence_and_the_description(wheels, folder):
    licence = (ROOT / "LICENSE").read_text()
    assert read(wheels[folder], "licenses/LICENSE") == licence
    metadata = email.message_from_string(read(wheels[folder], "METADATA"))
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    readme = (ROOT / folder / "README.md").read_text()
    assert str(metadata.get_payload()).strip() == readme.strip()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wheel_offers_its_plugin(wheels, folder):
    points = configparser.ConfigParser()
    points.read_string(read(wheels[folder], "entry_points.txt"))
    ((_, module),) = points["minisgl"].items()
    assert module.split(".")[0] == import_name(folder)
    assert f"{module.replace('.', '/')}.py" in names(wheels[folder])
    import_module(module)


def test_only_the_core_has_a_command(wheels):
    with_commands = [
        name for name in FOLDERS if "console" in read(wheels[name], "entry_points.txt")
    ]
    assert with_commands == [CORE]
    assert "minisgl = minisgl.cli:main" in read(wheels[CORE], "entry_points.txt")


def test_all_distributions_have_one_version():
    versions = {name: project(name)["version"] for name in FOLDERS}
    assert set(versions.values()) == {minisgl.__version__}, versions


@pytest.mark.parametrize("folder", PLUGINS)
def test_a_plugin_asks_for_this_minor_version_of_the_core(folder):
    needs = [Requirement(line) for line in project(folder)["dependencies"]]
    (core,) = [need for need in needs if need.name == CORE]
    version = Version(minisgl.__version__)
    following = f"{version.major}.{version.minor + 1}.0"
    assert minisgl.__version__ in core.specifier
    assert f"{version.major}.{version.minor}.999" in core.specifier
    assert following not in core.specifier


def test_the_core_needs_no_kernel_package():
    table = project(CORE)
    extras = [line for lines in table["optional-dependencies"].values() for line in lines]
    needed = {Requirement(line).name for line in [*table["dependencies"], *extras]}
    assert not needed & {*KERNELS, *PLUGINS}


def test_the_core_alone_lists_only_its_own_offers(wheels, installation):
    installation.install(wheels[CORE])
    done = installation.run("-m", "minisgl", "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    (only,) = json.loads(done.stdout)["plugins"]
    assert (only["distribution"], only["status"]) == (CORE, "active")
    where = installation.run("-c", "import minisgl; print(minisgl.__file__)")
    assert where.stdout.startswith(str(installation.folder))


GENERATE = """
import json, sys
from minisgl import LLM, SamplingParams

path, prompts = json.loads(sys.argv[1])
with LLM(path, progress=False, max_prefill_tokens=16, page_size=4) as llm:
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), progress=False)
print(json.dumps([result.token_ids for result in results]))
print("minisgl_models" in sys.modules)
"""


def test_the_core_alone_serves_by_transformers_code(wheels, installation, tmp_path):
    installation.install(wheels[CORE])
    model = write_tiny_model(tmp_path / "model", "Qwen3ForCausalLM")
    prompts = [list(range(3, 43)), [7, 8, 9]]
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    references = greedy(judge, prompts, 12, EOS_TOKEN_IDS)
    done = installation.run("-c", GENERATE, json.dumps([str(model), prompts]))
    assert done.returncode == 0, done.stderr
    tokens, imported = done.stdout.splitlines()
    assert imported == "False"
    for reference, got in zip(references, json.loads(tokens), strict=True):
        Tally().compare(reference, got, "the core alone")
    assert done.stderr.count("the fast version is in minisgl-models") == 1


def test_the_core_alone_names_what_is_missing(wheels, installation, tmp_path):
    installation.install(wheels[CORE])
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300}
    (model / "config.json").write_text(json.dumps(config))
    done = installation.run(
        *("-m", "minisgl", "generate", "--model", str(model), "--prompt", "hi"),
        *("--load-format", "dummy", "--log-level", "error", "--model-impl", "plugin"),
    )
    assert done.returncode != 0
    assert "Qwen3ForCausalLM" in done.stderr
    assert "minisgl-models" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("folder", PLUGINS)
def test_a_plugin_beside_the_core_alone_loads(wheels, installation, folder):
    """Without the packages of kernels that it may use: those are the probe's to miss."""
    for name in (CORE, folder):
        installation.install(wheels[name])
    listed = installation.run("-m", "minisgl", "plugins", "list", "--json")
    plugins = {p["distribution"]: p for p in json.loads(listed.stdout)["plugins"]}
    assert sorted(plugins) == sorted((CORE, folder))
    assert plugins[folder]["status"] == "active"
    assert plugins[folder]["offers"]


def test_all_distributions_together_load(wheels, installation):
    for wheel in wheels.values():
        installation.install(wheel)
    done = installation.run("-m", "minisgl", "plugins", "check", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    listed = installation.run("-m", "minisgl", "plugins", "list", "--json")
    assert [p["distribution"] for p in json.loads(listed.stdout)["plugins"]] == FOLDERS
