"""Metrics of shadows and roll-outs, whose series begin when the engine first reports them."""

from __future__ import annotations

import math
import random

import pytest

from tests.metrics.fake_metrics import (
    PAIR,
    fake_record,
    fake_shadow,
    fake_state,
    fake_step,
    labels_of,
    new_metrics,
    sample_value,
    scrape,
)


def test_without_roll_outs_there_are_no_series() -> None:
    names = {name for name, _ in scrape(new_metrics()) if name.startswith(("kvmux_shadow", "kvmux_rollout"))}
    assert names == {"kvmux_shadow_computed_tokens_total"}, "it is by strategy, and all of these are known"


def test_each_token_counts(rng: random.Random) -> None:
    metrics = new_metrics()
    kl = [10 ** rng.uniform(-7, 1.2) for _ in range(100)]
    agreed = [rng.random() < 0.7 for _ in kl]
    cut = rng.randrange(1, 100)
    metrics.observe_step(fake_step(shadows=[fake_shadow(kl[:cut], agreed[:cut])]))
    metrics.observe_step(fake_step(shadows=[fake_shadow(kl[cut:], agreed[cut:], ended_early="room")]))
    metrics.observe_step(fake_step(shadows=[fake_shadow([], [], ended_early="failed")]))
    samples = scrape(metrics)
    assert sample_value(samples, "kvmux_shadow_kl_nats_sum", **PAIR) == pytest.approx(sum(kl))
    assert sample_value(samples, "kvmux_shadow_kl_nats_count", **PAIR) == 100
    for edge in ("1e-06", "0.01", "10.0"):
        below = sum(value <= float(edge) for value in kl)
        assert sample_value(samples, "kvmux_shadow_kl_nats_bucket", **PAIR, le=edge) == below
    assert sample_value(samples, "kvmux_shadow_tokens_total", **PAIR) == 100
    assert sample_value(samples, "kvmux_shadow_top1_tokens_total", **PAIR) == sum(agreed)
    assert sample_value(samples, "kvmux_shadow_top1_ratio", **PAIR) == pytest.approx(sum(agreed) / 100)
    for result in ("complete", "room", "failed"):
        assert sample_value(samples, "kvmux_shadow_requests_total", **PAIR, result=result) == 1


def test_series_of_a_pair_begin_at_zero_and_others_keep_their_values() -> None:
    metrics = new_metrics(settings={"vllm_metric_names": True})
    metrics.observe_request(fake_record())
    before = scrape(metrics)
    after = scrape(metrics, fake_state(shadow_pairs=[("paged", "contiguous")], rollouts={"int8": ("shadow", 0.0)}))
    assert {key: after[key] for key in before} == before
    new = after.keys() - before.keys()
    assert {after[name, labels] for name, labels in new if "ratio" not in name} == {0, 1}, "1: the state"
    assert math.isnan(sample_value(after, "kvmux_shadow_top1_ratio", **PAIR))
    assert labels_of(after, "kvmux_shadow_tokens_total") == [PAIR], "and no other pair"


def test_a_roll_out_is_in_one_state() -> None:
    metrics = new_metrics()
    for state, share in (("shadow", 0.0), ("canary", 0.1), ("paused", 0.1), ("rolled_back", 0.0)):
        samples = scrape(metrics, fake_state(rollouts={"int8": (state, share)}))
        states = {labels["state"] for labels in labels_of(samples, "kvmux_rollout_state")}
        assert states == {"shadow", "canary", "paused", "complete", "rolled_back", "aborted"}
        for each in states:
            assert sample_value(samples, "kvmux_rollout_state", rollout="int8", state=each) == (each == state)
        assert sample_value(samples, "kvmux_rollout_share", rollout="int8") == share
    assert sample_value(scrape(metrics), "kvmux_rollout_share", rollout="int8") == 0, "it is gone"


def test_roll_backs_count() -> None:
    metrics = new_metrics()
    scrape(metrics, fake_state(rollouts={"int8": ("canary", 0.1)}))
    for rollbacks in (["int8"], [], ["int8", "int4"]):
        metrics.observe_step(fake_step(rollbacks=rollbacks))
    samples = scrape(metrics)
    for name, count in (("int8", 2), ("int4", 1)):
        assert sample_value(samples, "kvmux_rollout_rollbacks_total", rollout=name) == count
