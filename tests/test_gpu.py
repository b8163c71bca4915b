"""Islands of real GPUs; one GPU suffices, which hosts then share. Skips where there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Notebook, client, client_environment, hosts_of, said

from fairway.cluster.supervisor import Run
from fairway.errors import StartError
from fairway.settings import IslandSettings, Settings

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_lm.py"
SHARED = IslandSettings(1, 1, prefix=("env", "CUDA_VISIBLE_DEVICES=0"))


def has_gpu() -> bool:
    found = shutil.which("nvidia-smi")
    return found is not None and subprocess.run([found, "-L"], capture_output=True).returncode == 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="there is no GPU")]


@pytest.fixture(scope="module")
def islands() -> Iterator[Run]:
    """Two islands that share the first GPU."""
    settings = Settings(islands=(SHARED, SHARED), platform="cuda", device_memory="4GiB")
    with Run(settings) as run:
        yield run


@pytest.fixture(scope="module")
def do(islands: Run) -> Iterator[Callable[[str], None]]:
    with Notebook(islands) as notebook:
        yield notebook.run


def test_devices_are_gpus(islands: Run, do: Callable[[str], None]) -> None:
    kinds = {host["device_kind"] for host in hosts_of(islands)}
    assert all("NVIDIA" in kind for kind in kinds), kinds
    do("""
        first, other = jax.devices()
        assert first.platform == "gpu" and "NVIDIA" in first.device_kind, first
        assert jax.devices("gpu") == [first, other]
    """)


def test_programs_run_and_differentiate(do: Callable[[str], None]) -> None:
    do("""
        given = np.random.default_rng(1).standard_normal((512, 512), np.float32)
        with jax.default_matmul_precision("highest"):
            product = jax.jit(lambda x: x @ x.T)(given)
        np.testing.assert_allclose(product, given @ given.T, rtol=1e-4, atol=1e-3)
        slope = jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2)))(given)
        expected = 2 * np.tanh(given) / np.cosh(given) ** 2
        np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-5)
    """)


def test_libraries_of_the_vendor_are_found(do: Callable[[str], None]) -> None:
    do("""
        given = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32)
        positive = given @ given.T + 64 * np.eye(64, dtype=np.float32)
        factor = jax.jit(jnp.linalg.cholesky)(positive)
        np.testing.assert_allclose(np.asarray(factor), np.linalg.cholesky(positive), atol=1e-3)
        values = jax.jit(jnp.linalg.eigvalsh)(positive)
        np.testing.assert_allclose(values, np.linalg.eigvalsh(positive), rtol=1e-4)
        image = jnp.ones((1, 8, 8, 3))
        kernel = jnp.ones((3, 3, 3, 4))
        convolve = jax.jit(lambda x: jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        assert np.all(np.asarray(convolve(image)) == 27)
    """)


def test_arrays_move_between_islands(do: Callable[[str], None]) -> None:
    do("""
        first, other = jax.devices()
        for dtype in (np.float32, jnp.bfloat16, np.int8):
            given = np.arange(1 << 20).astype(dtype)
            here = jax.device_put(given, first)
            there = jax.device_put(here * 2, other)
            assert there.devices() == {other}
            assert np.array_equal(np.asarray(there), given * 2)
    """)


def test_islands_reduce_and_exchange(do: Callable[[str], None]) -> None:
    do("""
        mesh = Mesh(np.array(jax.devices()), ("island",))
        cut = NamedSharding(mesh, P("island"))
        given = np.arange(8, dtype=np.float32).reshape(4, 2)
        held = jax.device_put(given, cut)

        def both(body):
            whole = jax.shard_map(body, mesh=mesh, in_specs=P("island"), out_specs=P("island"))
            return np.asarray(jax.jit(whole)(held))

        total = given[:2] + given[2:]
        assert np.array_equal(both(lambda x: jax.lax.psum(x, "island")), np.tile(total, (2, 1)))
        swapped = both(lambda x: jax.lax.ppermute(x, "island", [(0, 1), (1, 0)]))
        assert np.array_equal(swapped, np.roll(given, 2, 0))
    """)


def test_groups_of_devices_sum_gather_and_scatter(do: Callable[[str], None]) -> None:
    do("""
        import fairway
        from jax.sharding import SingleDeviceSharding
        places = [SingleDeviceSharding(device) for device in jax.devices()]
        given = [np.arange(1 << 20, dtype=np.float32) + n for n in range(2)]
        held = [jax.device_put(one, place) for one, place in zip(given, places)]
        for found in fairway.all_reduce(held, places):
            assert np.array_equal(np.asarray(found), sum(given))
        stacks = fairway.all_gather(held, places)
        for found in stacks:
            assert np.array_equal(np.asarray(found), np.stack(given))
        for n, found in enumerate(fairway.reduce_scatter(stacks, places)):
            assert found.devices() == {jax.devices()[n]}
            assert np.array_equal(np.asarray(found), 2 * given[n])
    """)


def test_training_goes_as_on_cpus(islands: Run, tmp_path: Path) -> None:
    """Two islands of one GPU each, compared with two of one CPU device."""
    losses = {}
    for name, settings in (("gpu", None), ("cpu", Settings.parse("2x1x1"))):
        command = [sys.executable, str(EXAMPLE), "--steps", "20", "--out", str(tmp_path / name)]
        if settings is None:
            subprocess.run(command, env=client_environment(islands), check=True, timeout=250)
        else:
            with Run(settings) as run:
                subprocess.run(command, env=client_environment(run), check=True, timeout=250)
        losses[name] = json.loads((tmp_path / name / "train_lm.json").read_text())["losses"]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=2e-2)
    assert losses["gpu"][-1] < 0.8 * losses["gpu"][0]


def test_what_does_not_fit_is_told(islands: Run) -> None:
    found = client(
        islands,
        """
        def take():
            jax.block_until_ready(jax.jit(lambda: jnp.zeros((5 << 30,), jnp.int8))())
        say("took", error=fails(take))
        say("then", total=int(jnp.arange(10).sum()))
        """,
    )
    assert "RESOURCE_EXHAUSTED" in said(found.stdout, "took")["error"][1]
    assert said(found.stdout, "then") == {"total": 45}


def test_more_gpus_than_there_are_is_told() -> None:
    with pytest.raises(StartError, match="expected 99"):
        Run(Settings.parse("1x1x99", platform="cuda")).start()
