"""Plugin modules and command lines start without torch, transformers or a kernel package."""

import pytest

HEAVY = ("torch", "transformers", "triton", "flashinfer", "flash_attn", "numpy", "fastapi", "zmq")


@pytest.mark.parametrize(
    "code",
    [
        "import minisgl",
        "import minisgl.plugins",
        "import minisgl.plugins.builtin",
        "import minisgl_models.plugin",
        "import minisgl_attn_fa.plugin",
        "import minisgl_attn_flashinfer.plugin",
        "import minisgl_moe_triton.plugin",
        "from minisgl.plugins.host import load_plugins\nassert not load_plugins().failures",
        "import minisgl.plugins.selection",
        "import minisgl.settings",
        "from minisgl.cli import main\nassert main(['--help']) == 0",
        "from minisgl.cli import main\nassert main(['--version']) == 0",
        "from minisgl.cli import main\nassert main(['config', 'show']) == 0",
        "from minisgl.cli import main\nassert main(['plugins', 'list']) == 0",
        "from minisgl.cli import main\nassert main(['plugins', 'check']) == 0",
        "from minisgl.cli import main\nassert main(['plugins', 'show', 'torch']) == 0",
        "from minisgl.cli import main\nassert main(['serve', '--help']) == 0",
        "from minisgl.cli import main\nassert main(['bench', '--help']) == 0",
        "from minisgl.cli import main\nassert main(['bench', 'offline', '--help']) == 0",
        "from minisgl.cli import main\nassert main(['bench', 'kernels', '--help']) == 0",
        "from minisgl.cli import main\nassert main(['tune', 'moe', '--help']) == 0",
    ],
)
def test_works_with_heavy_packages_blocked(plugin_site, code):
    done = plugin_site.python(code, blocked=HEAVY)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_imports_not_even_the_settings(plugin_site):
    code = """
    from minisgl.cli import main
    assert main(["--help"]) == 0
    assert not {"pydantic", "minisgl.settings", "minisgl.plugins"} & set(sys.modules)
    """
    assert plugin_site.python(code).returncode == 0


def test_the_blocker_blocks(plugin_site):
    assert "torch is blocked" in plugin_site.python("import torch", blocked=HEAVY).stderr
