"""Progress bars: shown in a terminal, nowhere else."""

import pytest

import fdjax
from fdjax.system import progress

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "in_terminal", lambda: True)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def lm(two_layers):
    return fdjax.load(two_layers, max_batch=2, progress=False)


@pytest.mark.slow
def test_many_answers_show_how_far_they_are(lm, terminal, capsys):
    lm.generate([[5], [6], [7], [8]], max_new_tokens=40, eos_token_id=None)
    shown = capsys.readouterr().err
    assert "0/4" in shown and "tokens/s" in shown
    assert "2 running, 2 waiting" in shown


@pytest.mark.slow
def test_one_answer_and_a_pipe_show_nothing(lm, terminal, capsys, monkeypatch):
    lm.generate([5], max_new_tokens=4)
    monkeypatch.setattr(progress, "in_terminal", lambda: False)
    lm.generate([[5], [6]], max_new_tokens=4)
    captured = capsys.readouterr()
    assert not captured.err and not captured.out


@pytest.mark.parametrize(("show", "shown"), [(True, True), (False, False), (None, False)])
def test_loading(capsys, show, shown):
    with progress.loading("a model", show) as update:
        update(3, 10)
        update(10, 10)
    assert ("a model" in capsys.readouterr().err) == shown
