"""`fdjax doctor`: its findings on machines of all kinds, and its advice."""

import dataclasses
import importlib.metadata
import json
import logging
import zlib
from pathlib import Path

import jax
import pytest

from fdjax.cli.main import main
from fdjax.system import platform
from fdjax.tools import doctor
from fdjax.tools.doctor import Diagnosis, Finding, diagnose


@dataclasses.dataclass
class Device:
    """A device as JAX describes it."""

    device_kind: str = "NVIDIA H100 80GB HBM3"
    platform: str = "gpu"
    compute_capability: str = "9.0"
    id: int = 0

    def memory_stats(self):
        return {"bytes_limit": 60 * 10**9}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set up a machine: driver version, backend, devices, installed versions."""

    def set_up(driver=None, backend="cpu", devices=None, **versions):
        installed = {
            "jax-cuda13-plugin": None,
            "jax-cuda12-plugin": None,
            "jaxlib": jax.__version__,
        }
        installed |= {name.replace("_", "-"): v for name, v in versions.items()}
        real = doctor._version
        monkeypatch.setattr(
            doctor, "_version", lambda n: installed[n] if n in installed else real(n)
        )
        monkeypatch.setattr(platform, "nvidia_driver_version", lambda: driver)
        monkeypatch.setattr(platform, "nvidia_driver_present", lambda: driver is not None)
        monkeypatch.setattr(platform, "_cpu_was_asked_for", lambda: False)
        monkeypatch.setattr(platform, "default_backend", lambda: backend)
        ran = Finding("operations", "ok", "not run here")
        monkeypatch.setattr(doctor, "_operations", lambda: ran)
        monkeypatch.setattr(doctor, "_several_devices", lambda: ran)
        if devices is not None:
            monkeypatch.setattr(jax, "local_devices", lambda: devices)
            monkeypatch.setattr(jax, "local_device_count", lambda: len(devices))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(platform, "_DRIVER", tmp_path / "driver")
    return set_up


PLUGIN = {"jax_cuda13_plugin": jax.__version__, "jax_cuda13_pjrt": jax.__version__}


def found(subject: str) -> Finding:
    (finding,) = (f for f in diagnose().findings if f.subject == subject)
    return finding


def test_this_machine():
    diagnosis = diagnose()
    subjects = [f.subject for f in diagnosis.findings]
    assert subjects[:6] == [
        "fdjax",
        "jax",
        "libraries",
        "NVIDIA driver",
        "CUDA plugin",
        "devices",
    ]
    assert {f.status for f in diagnosis.findings} <= {"ok", "note", "problem"}
    by_subject = {f.subject: f for f in diagnosis.findings}
    assert by_subject["operations"].status == "ok"
    assert jax.__version__ in by_subject["jax"].text
    lines = str(diagnosis).splitlines()
    assert all(any(f.text in line for line in lines) for f in diagnosis.findings)


def test_a_machine_without_gpu_has_nothing_to_mend(machine):
    machine()
    diagnosis = diagnose()
    assert diagnosis.sound
    assert found("NVIDIA driver").status == found("CUDA plugin").status == "note"
    assert "trying and testing" in found("devices").text


def test_a_gpu_as_it_should_be(machine):
    machine("580.65.06", "gpu", [Device(), Device(id=1)], **PLUGIN)
    assert diagnose().sound
    assert found("NVIDIA driver").text == "580.65.06, runs CUDA 13"
    assert found("devices").text == "2 on platform gpu"
    assert "XLA_CLIENT_MEM_FRACTION=0.9" in found("memory").text
    text = found("device 1").text
    assert all(part in text for part in ("H100", "60.0 GB", "compute capability 9.0"))


@pytest.mark.parametrize(
    ("subject", "says", "advises", "set_up"),
    [
        ("CUDA plugin", "none", "jax[cuda13]", {}),
        ("devices", "although there is an NVIDIA driver", "jax[cuda13]", PLUGIN),
        ("NVIDIA driver", "570.1 is too old for CUDA 13", "580", PLUGIN | {"driver": "570.1"}),
        (
            "NVIDIA driver",
            "520.1 is too old for CUDA 12",
            "525",
            {"jax_cuda12_plugin": "1", "driver": "520.1"},
        ),
        (
            "CUDA plugin",
            "versions differ: jax-cuda13-plugin 0.1",
            f"jax[cuda13]=={jax.__version__}",
            PLUGIN | {"jax_cuda13_plugin": "0.1"},
        ),
        (
            "CUDA plugin",
            "jax-cuda13-pjrt missing",
            "jax[cuda13]",
            {"jax_cuda13_plugin": jax.__version__, "jax_cuda13_pjrt": None},
        ),
        (
            "device 0",
            "no bfloat16 tensor cores",
            "8.0 or newer",
            PLUGIN | {"backend": "gpu", "devices": [Device("Tesla T4", compute_capability="7.5")]},
        ),
        ("libraries", "no flax", "pip install flax", {"flax": None}),
        ("libraries", "no jinja2", "pip install jinja2", {"jinja2": None}),
    ],
)
def test_what_is_missing_is_named_with_its_cure(machine, subject, says, advises, set_up):
    machine(**{"driver": "580.65.06"} | set_up)
    finding = found(subject)
    assert finding.status == "problem"
    assert says in finding.text and advises in finding.cure
    assert not diagnose().sound


def test_why_a_plugin_does_not_load_is_said_in_one_line(machine, monkeypatch, capfd):
    machine("580.65.06", **PLUGIN)

    def default_backend():
        try:
            raise RuntimeError("Unable to load cuDNN. Is it installed?\nmore")
        except RuntimeError:
            logging.getLogger("jax._src.xla_bridge").exception("Jax plugin configuration error")
        return "cpu"

    monkeypatch.setattr(platform, "default_backend", default_backend)
    assert found("devices").text.endswith("driver: Unable to load cuDNN. Is it installed?")
    assert capfd.readouterr().err == ""


def test_a_cpu_that_was_asked_for_is_no_problem(machine, monkeypatch):
    machine("580.65.06", **PLUGIN)
    monkeypatch.setattr(platform, "_cpu_was_asked_for", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert found("devices").status == "note"
    assert "JAX_PLATFORMS=cpu" in found("devices").text


def test_a_platform_that_does_not_start(machine, monkeypatch):
    machine()

    def fail():
        raise platform.NoDeviceError("JAX cannot run on platform 'tpu'")

    monkeypatch.setattr(platform, "default_backend", fail)
    assert found("devices") == Finding(
        "devices",
        "problem",
        "JAX cannot run on platform 'tpu'",
        "unset JAX_PLATFORMS, or name a platform that exists",
    )
    assert diagnose().findings[-1].subject == "compilation cache"


def test_operations_that_fail_or_lie(monkeypatch):
    monkeypatch.setattr(doctor, "matmul", lambda x, w, plan: x @ w * 2)
    assert "wrong numbers" in doctor._operations().text

    def fail(*args, **kwargs):
        raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED\nmore")

    monkeypatch.setattr(doctor, "matmul", fail)
    assert doctor._operations().text == "fail: CUDNN_STATUS_NOT_INITIALIZED"


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0", "1.0"])
def test_a_jax_that_was_not_tested(machine, monkeypatch, version):
    machine()
    monkeypatch.setattr(jax, "__version__", version)
    finding = found("jax")
    assert (finding.status, ">=" in finding.cure, "<" in finding.cure) == ("problem", True, True)


def test_the_bounds_are_those_of_the_package(machine):
    machine()
    required = [r for r in importlib.metadata.requires("fdjax") if r.startswith("jax")]
    assert any(doctor._bounds("jax") in r for r in required)
    assert found("jax").status == "ok"


def test_the_cache_folder(machine, cache_setting, monkeypatch, tmp_path):
    machine()
    cache = tmp_path / "fdjax" / "xla"
    assert found("compilation cache").text == f"{cache}, 0.0 MB"
    cache.mkdir(parents=True)
    (cache / "program").write_bytes(bytes(2_500_000))
    (cache / "fdjax").mkdir()
    (cache / "fdjax" / "as lowered").write_bytes(bytes(1_000_000))
    assert found("compilation cache").text == f"{cache}, 3.5 MB"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "program"))
    assert found("compilation cache").status == "problem"
    assert found("compilation cache").cure == "set XDG_CACHE_HOME to a folder of yours"
    jax.config.update("jax_compilation_cache_dir", str(cache / "program" / "below"))
    assert found("compilation cache").cure == "set JAX_COMPILATION_CACHE_DIR to a folder of yours"
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert found("compilation cache") == Finding(
        "compilation cache", "problem", "no home", "set XDG_CACHE_HOME"
    )


@pytest.mark.parametrize("base", ["", "relative"])
def test_a_cache_folder_must_be_absolute(cache_setting, monkeypatch, tmp_path, base):
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert platform.compilation_cache_folder() == tmp_path / ".cache" / "fdjax" / "xla"


def test_damaged_programs_are_to_be_deleted(machine, cache_setting, tmp_path):
    machine()
    cache = tmp_path / "fdjax" / "xla"
    (cache / "fdjax").mkdir(parents=True)
    cut, sound = cache / "jit_cut-1-cache", cache / "jit_sound-2-cache"
    cut.write_bytes(zlib.compress(bytes(range(99)))[:-1])
    sound.write_bytes(zlib.compress(bytes(range(99))))
    lowered = cache / "fdjax" / ("0" * 64)
    lowered.touch()
    assert found("compilation cache") == Finding(
        "compilation cache",
        "problem",
        f"{cache}, 0.0 MB: 2 programs are damaged",
        f"delete {cut}, {lowered}",
    )
    for i in range(2):
        (cache / f"jit_emptied-{i}-cache").touch()
    assert found("compilation cache").cure == f"delete {cache}"
    for path in (cut, lowered, *cache.glob("jit_emptied*")):
        path.unlink()
    assert found("compilation cache").status == "ok"


@pytest.mark.parametrize(
    ("content", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC\n"
            "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            "580.65.06",
        ),
        ("nothing of the kind", None),
        (None, None),
    ],
)
def test_the_version_of_the_driver(monkeypatch, tmp_path, content, version):
    monkeypatch.setattr(platform, "_DRIVER", tmp_path / "version")
    if content is not None:
        (tmp_path / "version").write_text(content)
    assert platform.nvidia_driver_version() == version


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize("status", ["ok", "note", "problem"])
def test_exit_codes(monkeypatch, capsys, status, as_json):
    finding = Finding("subject", status, "text", "cure" if status == "problem" else None)
    monkeypatch.setattr(doctor, "diagnose", lambda: Diagnosis((finding,)))
    assert main(["doctor", *as_json]) == int(status == "problem")
    out, err = capsys.readouterr()
    assert err == ""
    if as_json:
        data = json.loads(out)
        assert data == {"sound": status != "problem", "findings": [dataclasses.asdict(finding)]}
    else:
        assert out.splitlines()[0].split() == [status, "subject", "text"]
        assert ("-> cure" in out) == (status == "problem")
