"""``python -m tests.support.ray_runs FOLDER FAILURES``: :mod:`tests.support.launched_runs` in two workers of Ray Train.

Ray listens on 127.0.0.1 alone, and keeps what it writes in the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    # Elsewhere than on macOS, too, what 127.0.0.1 is may stay so.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Seconds that a worker which is stopped is asked to leave its process group, before it is killed.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    "GLOO_SOCKET_IFNAME": "lo",
}

import ray
import ray.train
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig


def worker(config: dict[str, Any]) -> None:
    """One of the workers of TorchTrainer."""
    import pure_loop as pl
    from tests.support.launched_runs import train

    folder, started = Path(config["folder"]), time.monotonic()
    try:
        state = train(folder, device=ray.train.torch.get_device())
    except pl.errors.DistributedError as error:
        (folder / f"error{pl.distributed.rank()}").write_text(f"{time.monotonic() - started:.1f} {error}")
        raise
    ray.train.report({"batch": state.timestamp.batch, "ranks": pl.distributed.world_size()})


def main() -> None:
    folder, failures = sys.argv[1:]
    (Path(folder) / "ray").mkdir()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"{folder}/ray",
    )
    try:
        trainer = ray.train.torch.TorchTrainer(
            worker,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=int(failures))
            ),
        )
        print(json.dumps(trainer.fit().metrics))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
