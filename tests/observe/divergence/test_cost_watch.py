"""When what rounding costs of the loss counts."""

from __future__ import annotations

import json

import pytest

from foundry_fp8.observe.divergence.cost_watch import BUDGET, CostWatch
from foundry_fp8.observe.divergence.decision import Decision
from foundry_fp8.observe.divergence.observed import Observed, Rungs

RECIPES = ("delayed", "high_precision")
WHERE = {name: (name, "y", "loss_cost") for name in ("b0.q", "b1.q")}


class Run:
    """Of two linears, of which the second costs what a test says, and gradients of three blocks. The second may be an attention."""

    def __init__(self, quiet=5, output="y", product=("y", "product_noise")):
        self.where = WHERE | {"b1.q": ("b1.q", output, "loss_cost")}
        self.product = ("b1.q", *product)
        self.more = {}
        targets = {name: Rungs(unit=f"layer_00{name[1]}", recipes=RECIPES) for name in WHERE}
        self.decision = Decision(targets, quiet=quiet)
        self.batch = 0

    def feed(self, cost, gradients=(1.0, 1.0, 1.0), times=1, noise=None):
        """``cost`` of the loss; the first linear costs a hundredth of it. ``noise`` of the product of the second."""
        found = []
        for _ in range(times):
            self.batch += 1
            costs = {"b0.q": 0.02 * cost, "b1.q": 1.98 * cost}
            rungs = self.decision.rungs
            more = {} if noise is None or rungs["b1.q"] else {self.product: noise} | self.more
            seen = Observed(
                loss=2.0,
                signs={(f"layer_00{i}", "gradient_norm"): value for i, value in enumerate(gradients)},
                damage={self.where[name]: value for name, value in costs.items() if not rungs[name]} | more,
                shadow={self.where[name]: value for name, value in costs.items() if rungs[name]},
                loss_cost=sum(value for name, value in costs.items() if not rungs[name]) / 2,
                shadow_cost=sum(value for name, value in costs.items() if rungs[name]) / 2,
            )
            found += self.decision.decide(self.batch, seen)
        return [(e.unit, e.action) for e in found if e.action in ("demote", "promote")]


@pytest.mark.parametrize(("part", "moves"), [(0.9, []), (1.1, [("b1.q", "demote")])])
def test_the_linear_that_costs_is_demoted_once_all_cost_the_budget(part, moves):
    run, cost, found = Run(), BUDGET / 8, []
    run.feed(cost, times=20)
    while (cost := cost * 1.01) < part * BUDGET:  # hardly growing
        found += run.feed(cost)
    assert found + run.feed(cost, times=20) == moves


def test_what_grows_is_left_before_the_budget_is_spent_and_what_is_settled_is_not():
    run, cost = Run(), 1e-4
    run.feed(cost, times=20)
    while not run.feed(cost := cost * 1.3):
        assert cost < BUDGET
    assert BUDGET / 1.3**4 < cost < BUDGET
    settled, level = Run(), cost
    settled.feed(level, times=20)
    assert settled.feed(level, times=100) == []


def test_it_comes_back_once_it_would_cost_half_of_the_budget():
    run = Run(quiet=5)
    run.feed(1e-4, times=20)
    assert run.feed(3 * BUDGET, times=3) == [("b1.q", "demote")]
    assert run.feed(0.6 * BUDGET, times=50) == []
    assert run.feed(0.4 * BUDGET, times=5) == [("b1.q", "promote")]


PRODUCTS = {
    "y": ("y", ("y", "product_noise"), 1.0),
    "output of attention": ("o", ("o", "product_noise"), 1.0),
    "logits": ("o", ("qk", "logit_noise"), 0.02),
}


@pytest.mark.parametrize(("output", "product", "level"), PRODUCTS.values(), ids=PRODUCTS)
def test_what_a_product_loses_demotes_nothing_while_it_costs_little(output, product, level):
    """Nor for one look in which it seems to cost more; what is sick whatever its past does."""
    run = Run(output=output, product=product)
    run.feed(1e-3, times=20, noise=level)
    assert run.feed(1e-3, times=20, noise=10 * level) == []
    for _ in range(4):
        assert run.feed(BUDGET, noise=10 * level) + run.feed(1e-3, times=4, noise=10 * level) == []
    assert run.feed(1e-3, times=3, noise=100 * level) == [("b1.q", "demote")]
    run = Run(output=output, product=product)
    run.feed(1e-3, times=20, noise=level)
    assert run.feed(2 * BUDGET, times=3, noise=10 * level) == [("b1.q", "demote")]


@pytest.mark.parametrize(
    ("output", "product", "operand"), [("y", ("y", "product_noise"), "x"), ("o", ("qk", "logit_noise"), "k")]
)
def test_what_goes_into_a_product_that_costs_little_is_borne_where_its_other_products_are_seen(
    output, product, operand
):
    """Keys make gradients of queries, too, and nobody looks at those."""
    run = Run(output=output, product=product)
    run.feed(1e-3, times=20, noise=1e-2)
    run.more = {("b1.q", operand, "noise"): 1.0}
    run.feed(1e-3, times=20, noise=1e-2)
    run.more = {("b1.q", operand, "noise"): 20.0}
    assert run.feed(1e-3, times=5, noise=1e-2) == []
    assert run.feed(1e-3, times=3, noise=5 * (0.04 if output == "o" else 1.0)) == (
        [("b1.q", "demote")] if output == "o" else []
    )


def test_a_product_whose_cost_nobody_asks_is_judged_by_itself():
    run = Run(product=("dx", "product_noise_gradient"))
    run.feed(1e-3, times=20, noise=4.0)
    assert run.feed(1e-3, times=3, noise=40.0) == [("b1.q", "demote")]


@pytest.mark.parametrize("unit", [1.0, 1e3, 1e24])
def test_where_gradients_are_of_another_unit_costs_say_nothing(unit):
    """Neither that something is harmed nor that nothing is."""
    run = Run()
    run.feed(1e-3 * unit, times=20, noise=1.0)
    assert run.feed(1.5e-3 * unit, times=5, noise=1.0) == []
    assert (run.feed(1.5e-3 * unit, times=5, noise=20.0) == []) == (unit == 1)
    run = Run()
    run.feed(1e-3 * unit, times=20)
    run.decision.pulse(21, {WHERE["b1.q"]: 1e3 * unit})
    assert run.decision.look_again == (unit == 1)
    assert (run.feed(0.1 * unit, times=5) == []) == (unit > 1)


@pytest.mark.parametrize("blocks", [3, 2])
def test_a_loss_that_weighs_more_costs_no_more(blocks):
    """Rows that weigh ten times as much cost a hundred times as much, in the gradients of all blocks; of two of three, a layer is sick."""
    run = Run()
    run.feed(2e-4, times=20)
    gradients = [10.0] * blocks + [1.0] * (3 - blocks)
    for _ in range(20):  # heavy batches and others
        moved = run.feed(100 * 2e-4, gradients) + run.feed(100 * 2e-4, gradients) + run.feed(2e-4)
        assert bool(moved) == (blocks == 2)
        if moved:
            break


def test_what_a_linear_costs_is_by_weight_too():
    watch = CostWatch()
    for _ in range(20):
        watch.observe(1e-3, {"a": 1.0}, due=True)
    watch.observe(0.5, {"a": 10.0}, due=True)
    values = {WHERE["b0.q"]: 0.1, ("b0.q", "y", "product_noise"): 3.0}
    assert watch.weight == pytest.approx(25)
    assert watch.counted(values, 0.02) == pytest.approx(values | {WHERE["b0.q"]: 0.1 / 25})
    assert watch.counted(values, BUDGET / 2) == values | {WHERE["b0.q"]: 0.0}


def test_its_state_goes_on_where_it_was():
    first, second = CostWatch(), CostWatch()
    for step in range(12):
        first.observe(1e-4 * 1.2**step, {"a": 1.0, "b": 2.0 + step}, due=True)
    assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))) == []
    for watch in (first, second):
        watch.observe(2e-3, {"a": 9.0, "b": 20.0}, due=False)
    assert second.state_dict() == first.state_dict()
    assert (second.ahead, second.weight) == (first.ahead, first.weight) and first.weight > 1
    assert CostWatch().load_state_dict({"past": []}) == ["ahead", "level", "levels"]
