"""C text -> kernels: building, errors, the cache on disk and what it refuses."""
import os
import struct
import subprocess
import sys
import textwrap
import warnings

import pytest

from tokamak.errors import BuildError, CompilerMissing
from tokamak.runtime import build as building
from tokamak.runtime import cache as caching
from tokamak.runtime.build import Unit, build, compiler

TEXT = textwrap.dedent("""
    #include <stdint.h>
    static void *parallel;
    void tk_init(void *gomp_parallel, void *get_thread_num) { parallel = gomp_parallel; }
    int64_t %s(const int64_t *words, int64_t threads) { return words[0] * words[1] + threads + %d; }
    int64_t has_threads(const int64_t *words, int64_t threads) { return parallel != 0; }
""")
WORDS = struct.pack("2q", 6, 7)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has loaded nothing and has not warned."""
    monkeypatch.setattr(building, "_LOADED", {})
    caching.open_cache.cache_clear()
    caching._warn_once.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """The texts that went through the compiler."""
    seen, real = [], building.compile_text
    monkeypatch.setattr(building, "compile_text", lambda text, *rest: (seen.append(text), real(text, *rest))[1])
    return seen


def forget():
    building._LOADED.clear()
    caching.open_cache.cache_clear()


def test_kernels_run_and_equal_texts_are_one_library(compiled):
    kernels = build([Unit("a", TEXT % ("a", 0)), Unit("b", TEXT % ("b", 5)), Unit("c", TEXT % ("a", 0), "a")])
    assert [kernels[n](WORDS, 1) for n in "abc"] == [43, 48, 43]
    build([Unit("a", TEXT % ("a", 0))])
    assert len(compiled) == 2
    assert build([]) == {}


def test_many_libraries_do_not_pass_for_one_another():
    for i in range(8):
        assert build([Unit("k", TEXT % ("k", i))])["k"](WORDS, 0) == 42 + i


def test_units_with_one_prelude_share_a_compiler_process(compiled, monkeypatch):
    monkeypatch.setattr(building, "_cores", lambda: 2)
    head, one, two = "typedef long long i64;\n", "static i64 one(void) { return 1; }\n", "static i64 two(void) { return one() + one(); }\n"

    def unit(name, body, *prelude):
        return Unit(name, f"i64 {name}(const i64 *w, i64 t) {{ return {body}; }}\n", "", prelude)
    units = [unit("a", "one()", head, one), unit("b", "two()", head, one, two), unit("c", "w[0]", head), unit("d", "w[1]", head),
             Unit("e", "long long a(const long long *w, long long t) { return 9; }", "a")]
    kernels = build(units)
    assert [kernels[n](WORDS, 0) for n in "abcde"] == [1, 2, 6, 7, 9]
    assert len(compiled) == 3 and all(text.count("i64 one(void)") <= 1 for text in compiled)


def test_equal_names_do_not_share_a_shard(compiled):
    units = [Unit(name, f"i64 k(const i64 *w, i64 t) {{ return {i}; }}", "k", ("typedef long long i64;\n",)) for i, name in enumerate("abc")]
    kernels = build(units)
    assert [kernels[n](WORDS, 0) for n in "abc"] == [0, 1, 2] and len(compiled) == 3


def test_a_kernel_may_call_libc_and_libgcc():
    text = """#include <stdint.h>
        double fmod(double, double); void *memcpy(void *, const void *, unsigned long);
        int64_t k(const int64_t *w, int64_t t) { int64_t a[2]; memcpy(a, w, 16); volatile __int128 z = a[0];
        return (int64_t)(z * z / a[1]) + (int64_t)fmod(a[0], 4); }"""
    assert build([Unit("k", text)])["k"](WORDS, 1) == 5 + 2


def test_torchs_threads_are_told():
    assert build([Unit("k", TEXT % ("k", 0), "has_threads")])["k"](WORDS, 1) == int(building.threads.entry_points()[0] != 0)


def test_a_forked_child_stays_on_one_thread():
    kernel = build([Unit("k", TEXT % ("k", 0), "has_threads")])["k"]
    child = os.fork()
    if child == 0:
        later = build([Unit("k", TEXT % ("k", 1), "has_threads")])["k"]
        os._exit(kernel(WORDS, 1) + later(WORDS, 1))
    assert os.waitpid(child, 0)[1] == 0


def test_a_compilers_error_shows_the_command_and_its_words():
    with pytest.raises(BuildError, match="(?s)-O2.*error"):
        build([Unit("k", "int64_t k(")])


def test_a_missing_compiler_says_what_to_install():
    with pytest.raises(CompilerMissing, match="pip install"):
        compiler("no-such-cc")


def test_the_key_names_features_not_the_word_native():
    cc = compiler()
    assert "native" not in building.target()
    assert building.key("a", cc) != building.key("b", cc) and len(building.key("a", cc)) == 64


# -- the cache -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "kernels"


def once(folder, number=0):
    return build([Unit("k", TEXT % ("k", number))], cache_dir=str(folder))["k"](WORDS, 0)


def test_a_second_process_builds_nothing(folder, compiled):
    assert once(folder) == 42
    forget()
    assert once(folder) == 42 and len(compiled) == 1
    assert folder.stat().st_mode & 0o777 == 0o700 and [p.stat().st_mode & 0o777 for p in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b"", lambda b: b[:2000] + b"x" + b[2001:], lambda b: b"#!/bin/sh"])
def test_a_corrupt_entry_is_built_again_with_a_warning(folder, compiled, damage):
    once(folder)
    entry, = folder.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    forget()
    with pytest.warns(UserWarning, match="corrupt"):
        assert once(folder) == 42
    forget()
    assert once(folder) == 42 and len(compiled) == 2


def test_an_entry_under_another_name_is_corrupt(folder):
    once(folder, 0)
    entry, = folder.iterdir()
    os.rename(entry, folder / f"{building.key(TEXT % ('k', 1), compiler())}.so")
    forget()
    with pytest.warns(UserWarning, match="corrupt"):
        assert once(folder, 1) == 43


def test_an_entry_that_others_may_write_is_ignored(folder, compiled):
    once(folder)
    next(folder.iterdir()).chmod(0o666)
    forget()
    with pytest.warns(UserWarning, match="other users"):
        assert once(folder) == 42
    assert len(compiled) == 2


def test_a_link_in_the_place_of_an_entry_is_not_followed(folder, tmp_path):
    once(folder)
    entry, = folder.iterdir()
    os.rename(entry, tmp_path / "elsewhere.so")
    entry.symlink_to(tmp_path / "elsewhere.so")
    forget()
    with pytest.warns(UserWarning):
        assert once(folder) == 42


def test_an_open_directory_is_not_used(folder):
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.warns(UserWarning, match="0700"):
        assert once(folder) == 42
    assert not list(folder.iterdir())


def test_a_parent_that_others_may_write_is_refused(tmp_path):
    middle = tmp_path / "shared"
    middle.mkdir()
    middle.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write"):
        assert once(middle / "kernels") == 42
    forget()
    caching._warn_once.cache_clear()
    middle.chmod(0o1777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once(middle / "kernels")


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="no kernel cache"):
        assert once(tmp_path / "file" / "kernels") == 42


def test_a_full_disk_keeps_nothing_and_leaves_nothing(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(caching.os, "rename", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert once(folder) == 42
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_or_read_is_one_warning(folder, monkeypatch):
    """However many kernels: the message names no file."""
    cache, opened = caching.Cache(str(folder)), os.open

    def refused(path, *rest, **how):
        if "dir_fd" in how:
            raise OSError(5, "Input/output error", path)
        return opened(path, *rest, **how)
    monkeypatch.setattr(caching.os, "open", refused)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(3):
            cache.put(f"{n:064d}", b"library")
            assert cache.get(f"{n:064d}") is None
    assert len(told) == 2 and all("Input/output error" in str(w.message) for w in told)


def test_without_memory_files_a_kernel_is_loaded_from_a_private_folder(monkeypatch):
    def refused(*_):
        raise OSError("not here")
    monkeypatch.setattr(building, "_load_from_memory", refused)
    assert build([Unit("k", TEXT % ("k", 0))])["k"](WORDS, 0) == 42


def test_processes_may_race(folder):
    program = textwrap.dedent(f"""
        import struct
        from tokamak.runtime.build import Unit, build
        kernels = build([Unit(f"k{{i}}", {TEXT!r} % (f"k{{i}}", i)) for i in range(4)], cache_dir={str(folder)!r})
        assert [kernels[f"k{{i}}"](struct.pack("2q", 6, 7), 0) for i in range(4)] == [42, 43, 44, 45]
    """)
    processes = [subprocess.Popen([sys.executable, "-W", "error::UserWarning", "-c", program]) for _ in range(2)]
    assert [p.wait() for p in processes] == [0, 0]
    assert len(list(folder.iterdir())) == 4
