"""Options: what they refuse, scopes, and the environment; what is printed."""
import io
from pathlib import Path

import pytest
import torch

import tokamak
from tokamak import OptionError, Options, scope
from tokamak.log import Progress, say
from tokamak.options import current


def test_scope_restores():
    before = current()
    with scope(policy="eager", logs="graph, fusion") as inner:
        assert current() is inner and inner.policy == "eager" and inner.logs == {"graph", "fusion"}
        with scope(pool=False):
            assert current().policy == "eager" and not current().pool
    assert current() == before
    with pytest.raises(ZeroDivisionError), scope(check=True):
        1 / 0
    assert current() == before


@pytest.mark.parametrize("changes, message", [
    ({"polcy": "fast"}, "did you mean 'policy'"), ({"policy": "fastt"}, "did you mean 'fast'"), ({"until": "fusion"}, "did you mean 'fuse'"),
    ({"logs": {"graphs"}}, "did you mean 'graph'"), ({"pool": 1}, "True or False"), ({"zzz": 1}, "the options are policy"),
    ({"target": "cuda"}, "one of '', 'interpret'"), ({"check": 1}, "one of True, False, 'report'"), ({"logs": 5}, "topics, of graph, fusion"),
    ({"logs": [["graph"]]}, "topics, of graph, fusion"),
    ({"cache_dir": 5}, "a folder or empty"), ({"cc": ["gcc"]}, "a command or empty"), ({"progress": "no"}, "True or False"),
    ({"recorder": 5}, "with tokamak.recording"), (["fast"], r"options=\['fast'\]: a dictionary")])
def test_refusals_name_the_nearest(changes, message):
    with pytest.raises(OptionError, match=message):
        Options().change(changes)


def test_a_path_is_a_folder_or_a_command():
    options = Options(cache_dir=Path("/some/where"), cc=Path("/usr/bin/gcc"))
    assert (options.cache_dir, options.cc) == ("/some/where", "/usr/bin/gcc")


def test_a_mode_that_there_is_not_is_refused_by_both_ways():
    with pytest.raises(OptionError, match="mode='max-autotun': one of None, 'default', .* did you mean 'max-autotune'"):
        tokamak.compile(abs, mode="max-autotun")
    with pytest.raises(OptionError, match="did you mean 'max-autotune'"):
        torch.compile(lambda x: x + 1, backend="tokamak", mode="max-autotun")(torch.ones(2))


def test_the_environment(monkeypatch):
    monkeypatch.setenv("TOKAMAK_STRICT", "1")
    monkeypatch.setenv("TOKAMAK_CHECK", "0")
    monkeypatch.setenv("TOKAMAK_LOGS", "graph,output_code")
    monkeypatch.setenv("TOKAMAK_CACHE_DIR", "/somewhere")
    options = Options()
    assert options.progress
    monkeypatch.setenv("TOKAMAK_PROGRESS", "0")
    assert not Options().progress
    assert options.strict and not options.check and options.logs == {"graph", "output_code"} and options.cache_dir == "/somewhere"
    monkeypatch.setenv("TOKAMAK_STRICT", "perhaps")
    with pytest.raises(OptionError, match="give 0 or 1"):
        Options()
    monkeypatch.delenv("TOKAMAK_STRICT")
    monkeypatch.setenv("TOKAMAK_LOGS", "fuson")
    with pytest.raises(OptionError, match="did you mean 'fusion'"):
        Options()


def test_a_log_speaks_only_when_asked(capsys):
    say(Options(logs=frozenset()), "graph", "a title", "a text")
    assert capsys.readouterr().err == ""
    say(Options(logs=frozenset({"graph"})), "graph", "a title", "a text")
    assert capsys.readouterr().err == "-- tokamak graph: a title\na text\n"
    with pytest.raises(KeyError):
        say(Options(), "grafh", "", "")


def test_the_line_of_a_build_comes_after_a_second_and_goes():
    now, stream = [0.0], io.StringIO()
    with Progress(stream, lambda: now[0]) as line:
        line(0, 3)
        assert stream.getvalue() == ""
        now[0] = 1.5
        line(1, 3)
        line(1, 3)
        line(2, 3)
        assert stream.getvalue() == "\rtokamak: 1 of 3 kernels built\x1b[K\rtokamak: 2 of 3 kernels built\x1b[K"
    assert stream.getvalue().endswith("\r\x1b[K")


def test_no_line_where_nothing_takes_long_and_none_without_a_terminal():
    stream = io.StringIO()
    with Progress(stream, lambda: 0.0) as line:
        line(1, 1)
    assert stream.getvalue() == ""
    later = iter((0.0, 9.0, 9.0))
    with Progress(None, lambda: next(later)) as line:
        line(1, 2)
    stream = io.StringIO()
    later = iter((0.0, 9.0))
    with pytest.raises(KeyError), Progress(stream, lambda: next(later)) as line:
        line(1, 2)
        raise KeyError
    assert stream.getvalue().endswith("\r\x1b[K")
