"""Builds groups for learner tests, with behaviour logprobs computed one answer at a time in float64."""

import numpy as np
import torch
from transformers import LlamaForCausalLM

from actors.learner.learner import Learner
from actors.learner.options import AlgorithmOptions, LearnerOptions
from storage.records import Group, GroupKey, Prompt, Sample, Segment

VOCABULARY = 13
EOS = 0  # also the id that the learner pads with


def reference_distribution(model, ids, temperature=1.0, top_k=0, top_p=1.0):
    """Log-distribution after every position of one unpadded sequence, float64[n, vocabulary], by the rule in words."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(map(int, ids))])).logits[0].double().numpy() / temperature
    out = np.full_like(logits, -np.inf)
    for t, row in enumerate(logits):
        order = np.argsort(-row, kind="stable")
        if top_k:
            order = order[:top_k]
        mass = np.exp(row[order] - row[order].max())
        mass /= mass.sum()
        kept = 1 + int(np.searchsorted(np.cumsum(mass), top_p)) if top_p < 1 else len(order)
        order = order[:kept]
        out[t, order] = row[order] - (row[order].max() + np.log(np.exp(row[order] - row[order].max()).sum()))
    return out


def reference_logprobs(model, prompt, answer, **sampling):
    ids = [*prompt, *answer]
    table = reference_distribution(model, ids, **sampling)
    return np.array([table[len(prompt) - 1 + t, token] for t, token in enumerate(answer)], np.float32)


def make_sample(key, index, answer, logprobs, *, reward=0.0, status="ok", finish="stop", version=0, environment=()):
    """One sample; positions in ``environment`` are tool output, so the answer is cut into several segments."""
    segments, start = [], 0
    outside = [t in environment for t in range(len(answer))]
    for t in range(1, len(answer) + 1):
        if t == len(answer) or outside[t] != outside[start]:
            tool = outside[start]
            segments.append(
                Segment(
                    source="environment" if tool else "policy",
                    version=-1 if tool else version,
                    token_ids=np.array(answer[start:t], np.int32),
                    logprobs=np.zeros(t - start, np.float32) if tool else np.array(logprobs[start:t], np.float32),
                )
            )
            start = t
    return Sample(
        key=key,
        index=index,
        segments=tuple(segments),
        text="",
        finish_reason=finish,
        reward=reward if status == "ok" else None,
        reward_status=status,
    )


def make_group(number, answers, rewards, *, prompt=(1, 2, 3), logprobs=None, **fields):
    """One group; ``fields`` holds per-sample lists, for instance ``finish=["stop", "length"]``."""
    key = GroupKey("train", 0, number)
    samples = tuple(
        make_sample(
            key,
            i,
            answer,
            [-1.0] * len(answer) if logprobs is None else logprobs[i],
            reward=reward,
            **{name: values[i] for name, values in fields.items()},
        )
        for i, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
    )
    return Group(key=key, prompt=Prompt(index=number, token_ids=np.array(prompt, np.int32), text=""), samples=samples)


def random_groups(path, *, groups=4, samples=4, seed=0, longest=20, drift=0.3, sampling=None, noise_rewards=True):
    """Groups of random tokens with a long tail; behaviour is the policy's logprob plus N(0, drift)."""
    model = LlamaForCausalLM.from_pretrained(path).eval()
    rng = np.random.default_rng(seed)
    result = []
    for number in range(groups):
        prompt = [1, *rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist()]
        answers = [
            rng.integers(0, VOCABULARY, int(np.clip(rng.lognormal(1.5, 0.8), 1, longest))).tolist()
            for _ in range(samples)
        ]
        logprobs = [reference_logprobs(model, prompt, a, **(sampling or {})) for a in answers]
        if drift:
            logprobs = [lp + rng.normal(0, drift, len(lp)).astype(np.float32) for lp in logprobs]
        rewards = rng.normal(size=samples).round(2).tolist() if noise_rewards else [1.0] * samples
        result.append(make_group(number, answers, rewards, prompt=prompt, logprobs=logprobs))
    return result


def make_learner(
    path, algorithm="grpo", *, max_tokens=24, total_steps=10, sampling=None, seed=0, asynchrony=None, **fields
):
    """A learner on CPU; ``fields`` go to the algorithm's options when it knows them, else to the learner's."""
    known = AlgorithmOptions.model_fields
    return Learner(
        path,
        LearnerOptions(device="cpu", **{k: v for k, v in fields.items() if k not in known}),
        AlgorithmOptions(name=algorithm, **{k: v for k, v in fields.items() if k in known}),
        **({"temperature": 1.0, "top_p": 1.0, "top_k": 0} | (sampling or {})),
        max_tokens=max_tokens,
        seed=seed,
        total_steps=total_steps,
        asynchrony=asynchrony,
    )


def gradient_of(learner, groups, step=0):
    """Gradient that one training step accumulates (concatenated over minibatches), without touching the weights."""
    collected = []

    def record():
        collected.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]).clone())
        learner.model.zero_grad()
        from actors.learner.optimiser import Update

        return Update(False, 0.0, 0.0)

    original, learner._optimiser.step = learner._optimiser.step, record
    try:
        learner.train_step(groups, step)
    finally:
        learner._optimiser.step = original
    return torch.cat(collected) if collected else None


def weights_of(learner):
    return torch.cat([t.flatten().clone() for t in learner.state().values()])
