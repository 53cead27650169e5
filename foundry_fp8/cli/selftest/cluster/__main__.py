"""``python -m foundry_fp8.cli.selftest.cluster STAGE [--dry]``: one rank of one stage."""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback

from foundry_fp8.cli.selftest.cluster.ranks import CANNOT_RUN, CannotRunError, Ranks


def main(name: str, dry: bool) -> None:
    """Run it, print ``{"rows": checks}`` on rank 0, and end this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rows, code = [], 1
    try:
        ranks = Ranks(dry=dry)
        rows = ranks.rows
        if name in ("network", "collectives"):
            from foundry_fp8.cli.selftest.cluster import network

            getattr(network, name)(ranks)
        else:  # which imports more
            from foundry_fp8.cli.selftest.cluster import wrappers

            wrappers.compressed(ranks) if name == "compressed" else wrappers.train(ranks, name)
        code = int(not all(row["ok"] for row in rows))
        if code:
            wrong = [f"{row['check']}: {row['figures']}" for row in rows if not row["ok"]]
            print("; ".join(wrong), file=sys.stderr)
    except CannotRunError as error:
        code = CANNOT_RUN
        print(error, file=sys.stderr)
    except BaseException:  # whatever it is, the checks that were made are printed
        traceback.print_exc()
    if os.environ["RANK"] == "0":
        print(json.dumps({"rows": rows}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no thread of a communication library holds a rank whose peers are gone


if __name__ == "__main__":
    main(sys.argv[1], "--dry" in sys.argv[2:])
