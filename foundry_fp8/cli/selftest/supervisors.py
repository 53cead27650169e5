"""Who runs a stage's processes: alone on this machine, or one supervisor a rank under a launcher (``composer -n 8``, ``torchrun``).

Under a launcher rank 0 leads: it says through a store which stage begins, and each supervisor runs the process of its own rank. A stage
that concerns one GPU runs on the leader alone.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

from foundry_fp8.cli.selftest.processes import Ended, run_processes

__all__ = ["Supervisors"]

POLL_S = 0.2


class Supervisors:
    """The supervisors of all ranks, as one of them sees them.

    Where there is no launcher, ``local_ranks`` processes run of a stage on every rank.

    Attributes:
        rank: Of this supervisor; 0 leads.
        world: Processes of a stage on every rank.
    """

    def __init__(self, local_ranks: int) -> None:
        import torch.distributed as dist

        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.rank = int(os.environ["RANK"]) if launched else 0
        self.world = int(os.environ["WORLD_SIZE"]) if launched else local_ranks
        self._launched = launched
        self._store: Any = dist.HashStore()
        if launched:
            self._store, _, _ = next(
                iter(dist.rendezvous("env://", self.rank, self.world, timeout=datetime.timedelta(minutes=5)))
            )
        self._number = 0

    def lead(self, command: tuple[str, ...], log: Path, limit_s: float, environment: dict[str, str], *, every_rank: bool) -> list[Ended]:  # fmt: skip
        """Run a stage; how each of its processes ended, by rank."""
        if not every_rank:
            return run_processes(command, [environment], log, limit_s=limit_s)
        from torch.distributed.elastic.utils.distributed import get_free_port

        order = {"command": command, "log": str(log), "limit_s": limit_s, "environment": environment, "port": get_free_port()}  # fmt: skip
        self._store.set(f"order{self._number}", json.dumps(order))
        return self._take_part(order)

    def follow(self) -> None:
        """Run what rank 0 orders, until it ends."""
        while True:
            order = self._ask(f"order{self._number}", 3600.0)
            if not order:
                return
            self._take_part(order)

    def end(self) -> None:
        """No more stages."""
        if self._launched:
            self._store.set(f"order{self._number}", json.dumps(None))
            time.sleep(2 * POLL_S)  # the store lives here

    def _take_part(self, order: dict[str, Any]) -> list[Ended]:
        number, log = self._number, Path(order["log"])
        self._number += 1
        log.parent.mkdir(parents=True, exist_ok=True)
        failed_key = f"failed{number}"

        def stop(failed: bool) -> bool:
            if failed and not self._store.check([failed_key]):
                self._store.set(failed_key, "yes")
            return failed or bool(self._store.check([failed_key]))

        ends = run_processes(
            order["command"], self._environments(order), log, limit_s=order["limit_s"], stop=stop
        )
        if not self._launched:
            return ends
        (end,) = ends
        mine = json.dumps([end.code, end.output, end.errors[-20000:], end.where])
        self._store.set(f"ended{number}/{self.rank}", mine)
        if self.rank:
            return ends
        found = [self._ask(f"ended{number}/{rank}", 60.0) for rank in range(self.world)]
        return [Ended(*one) if one else Ended(None, "", "its supervisor does not answer") for one in found]

    def _environments(self, order: dict[str, Any]) -> list[dict[str, str]]:
        common = {**order["environment"], "MASTER_PORT": str(order["port"]), "WORLD_SIZE": str(self.world)}
        if self._launched:
            return [common]
        ranks = [{"RANK": str(r), "LOCAL_RANK": str(r), "NODE_RANK": "0"} for r in range(self.world)]
        here = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(self.world)}
        return [{**common, **here, **rank} for rank in ranks]

    def _ask(self, key: str, seconds: float) -> Any:
        until = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > until:
                return None
            time.sleep(POLL_S)
        return json.loads(self._store.get(key))
