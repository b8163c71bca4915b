"""``--timeline``: hosts, clients, the controller; queueing; transfers with source and target."""

import json
from pathlib import Path

from conftest import Start, client

from fairway.report.timeline import Timeline

BACK_AND_FORTH = """
import time
on = [NamedSharding(Mesh(np.array([d for d in jax.devices() if d.island == i]), "x"), P("x"))
      for i in (0, 1)]
grow = jax.jit(lambda x: x + 1)
x = jax.device_put(np.ones((512, 512), "f"), on[0])
for _ in range(3):
    x = jax.device_put(grow(x), on[1])
    x = jax.device_put(grow(x), on[0])
jax.block_until_ready(x)
time.sleep(0.2)  # some samples
"""


def test_a_run_is_seen_from_all_sides(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = start("2x1x2", timeline=path)
    ended = client(run, BACK_AND_FORTH)
    assert ended.returncode == 0, ended.stdout
    run.close()
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"controller", "client 1", "compilations", "device 0", "island 1 host 0"} <= names
    assert {"runs on island 0 host 0", "out: island 0 host 0", "in: island 0 host 0"} <= names
    spans = [event for event in events if event["ph"] == "X"]
    assert any("grow" in e["name"] or "lambda" in e["name"] for e in spans if e["pid"] >= 1 << 20)
    assert any(e["ph"] == "b" and e["cat"] == "compile" for e in events)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"memory of host 0", "launches of host 1", "memory of client 1"} <= counters
    # Each arrow begins within a slice and ends within one of another process.
    arrows: dict[int, dict[str, dict[str, float]]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    assert len(arrows) >= 6
    for arrow in arrows.values():
        assert arrow["s"]["pid"] != arrow["f"]["pid"]
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]
        for end in arrow.values():
            assert any(
                (e["pid"], e["tid"]) == (end["pid"], end["tid"])
                and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
                for e in spans
            ), end


def test_what_waits_for_a_device_is_shown(tmp_path: Path) -> None:
    """Two launches arrived at once: the second was queued while the first ran."""
    records = tmp_path / "trace-0.jsonl"
    runs = [["run", 0, 4000, 10, [0], "f", 1, 0], ["run", 4000, 9000, 10, [0], "g", 2, 1000]]
    records.write_text("".join(json.dumps(run) + "\n" for run in runs))
    Timeline({0: (0, 0, records)}).write(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    waits = [(e["name"], e["ph"], e["ts"]) for e in events if e.get("cat") == "queue"]
    assert waits == [("queued: g", "b", 1.0), ("queued: g", "e", 4.0)]
    (second,) = (e for e in events if e["ph"] == "X" and e["name"] == "g" and e["pid"] == 0)
    assert second["args"] == {"client": 2, "dispatch_us": 0.01, "queued_us": 3.0}
