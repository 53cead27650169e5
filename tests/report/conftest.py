import pytest

from foundry_fp8.report import write


@pytest.fixture(autouse=True, scope="session")
def _small_figures():
    """What is drawn is looked at in figures and in SVG: the PNGs beside them are there, with a ninth of the pixels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_PNG_DPI", 80)
        yield
