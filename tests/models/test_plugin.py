"""The plugin module itself: light to import, and every record leads somewhere."""

import subprocess
import sys

from minisgl.models.interface import BaseLLMModel
from support.forward import load_name, records
from support.tiny_models import ARCHITECTURES


def test_plugin_imports_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import minisgl_models.plugin as plugin\n"
        "assert len(list(plugin.minisgl_models())) == 8\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_architecture_has_a_reader_and_a_model():
    assert set(records()) == set(ARCHITECTURES)
    for name, record in records().items():
        assert callable(load_name(record.config_reader))
        assert issubclass(load_name(record.model), BaseLLMModel)
        assert record.model.endswith(f":{name}")
