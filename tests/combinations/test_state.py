"""Whatever has state, in any checkpoint: resumed as it was, with other settings, as an addition, or on other ranks.

A resume begins with the checkpoint's parameters, and its first gradient is that of the functional forms with the state that it should
have; unchanged, it is bit for bit the run that nothing interrupted.
"""

from importlib.metadata import entry_points

import pytest

from tests.combinations.parts import PARTS
from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]
IMPORTS = f"{launch.COMPOSER},transformers.models.llama.modeling_llama,tests.combinations.resuming"
KINDS = ["monolithic", "sharded"]
SAMPLE = ["everything"], ["sharded"]
QUICK, EVERY = ("unchanged", "changed"), ("unchanged", "changed", "added")
SAVED, DAMAGED = 4, "inner.model.model.layers.1.mlp.down_proj"


def resumed(names, kinds, folder, worlds, ways):
    from tests.combinations.resuming import elsewhere, resumptions

    ranks = launch.call(resumptions, 2, names, kinds, str(folder), ways, imports=IMPORTS)
    for world in worlds:
        ranks += launch.call(elsewhere, world, names, kinds, str(folder), imports=IMPORTS)
    return ranks


def wrong(name, kind, how, facts):
    part, found = PARTS[name], []
    if facts["first"] != SAVED or facts["loaded"] or facts["failed"] or not facts["constant"]:
        found.append(f"{facts['first']=} {facts['loaded'][:3]=} {facts['failed']=} {facts['constant']=}")
    if facts["optimizer"]:
        found.append(f"{facts['optimizer'][:3]=}")
    if not facts["gradient"] <= part.lossy:
        found.append(f"{facts['gradient']=}")
    found += facts.get("differs", [])
    if facts.get("steps") not in (None, [1, 2, 3, 4, 5, 6]):
        found.append(f"the run log holds batches {facts['steps']}")
    refusal = part.refused.get((how, kind))
    if refusal and any(w not in facts["refusal"] for w in (refusal.says, refusal.way) if w):
        found.append(f"{refusal} is not what ended it: {facts['refusal']}")
    return [f"{name}, {kind}, {how}: {text}" for text in found]


def check(names, kinds, folder, worlds, ways=EVERY):
    problems = []
    for rank in resumed(names, kinds, folder, worlds, ways):
        for key, facts in rank.items():
            problems += wrong(*key, facts)
            problems += wrong_guard(*key, facts)
    assert not problems, "\n".join(problems[:20])


def wrong_guard(name, kind, how, facts):
    """The damaged layer was demoted before the checkpoint was saved, and the resumed run begins with what it was demoted to."""
    if "divergence_guard" not in PARTS[name].settings.callbacks:
        return []
    state, runs = facts["guard"], facts["running"][DAMAGED]
    demoted = {
        e["unit"]: e["signal"] for e in state["events"] if e["action"] == "demote" and e["batch"] < SAVED
    }
    to = demoted.get(DAMAGED, "delayed -> delayed").rpartition(" ")[2]
    ok = (how == "added") == (to == "delayed") and runs == ("high_precision" if how == "changed" else to)
    return [] if ok else [f"{name}, {kind}, {how}: {runs=} {demoted=}"]


def test_a_sample(tmp_path):
    check(*SAMPLE, tmp_path, worlds=[], ways=QUICK)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if not part.missing])
def test_every_part(name, tmp_path):
    check([name], KINDS, tmp_path, worlds=[4])


def test_every_registered_name_is_in_a_part():
    for kind in ("algorithms", "callbacks", "loggers"):
        ours = {
            e.name for e in entry_points(group=f"llmfoundry_{kind}") if e.value.startswith("foundry_fp8.")
        }
        assert ours and ours <= {name for part in PARTS.values() for name in getattr(part.settings, kind)}
    ours = {e.name for e in entry_points(group="llmfoundry_optimizers") if e.value.startswith("foundry_fp8.")}
    assert ours and ours <= {part.settings.optimizer["name"] for part in PARTS.values()}
