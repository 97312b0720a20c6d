"""Configurations that must be rejected. Each row: arguments, and what the error must contain."""

from __future__ import annotations

from dataclasses import dataclass

BASE = ("+exp=quickstart",)


@dataclass(frozen=True)
class Mistake:
    """``starting_only``: launch/plan.py accepts it, since the problem is this machine or a folder."""

    typed: tuple[str, ...]
    shows: str
    starting_only: bool = False

    def __str__(self) -> str:
        return " ".join(self.typed)


def wrong(*typed: str, shows: str | None = None, starting_only: bool = False) -> Mistake:
    return Mistake(typed, shows or typed[0].lstrip("+"), starting_only)


KINDS: dict[str, tuple[Mistake, ...]] = {
    "unknown keys and groups": (
        wrong("model.hidden=64", shows="model.hidden"),
        wrong("modle.hidden_size=64", shows="modle"),
        wrong("+train.stepz=3", shows="stepz"),
        wrong("zero=stage4", shows="stage4"),
        wrong("engine=horovod", shows="horovod"),
        wrong("data=imagenet", shows="imagenet"),
        wrong("+exp=quickstrat", shows="quickstrat"),
        wrong("train.steps", shows="train.steps"),
    ),
    "values of the wrong type or size": (
        wrong("model.hidden_size=wide", shows="model.hidden_size"),
        wrong("model.hidden_size=0"),
        wrong("train.steps=-1"),
        wrong("train.steps=1.5", shows="train.steps"),
        wrong("train.micro_batch=0"),
        wrong("precision=fp4", shows="fp4"),
        wrong("optim.name=lions", shows="lions"),
        wrong("optim.betas=[0.9]", shows="optim.betas"),
        wrong("optim.lr=-1", shows="optim.lr=-1"),
        wrong("schedule.name=step", shows="schedule.name"),
        wrong("checkpoint.every=5parsecs"),
        wrong("checkpoint.keep_last=0"),
        wrong("budget.until=tomorrow"),
        wrong("budget.usd=5", shows="budget.gpu_hours=10"),
        wrong("run.name=a/b"),
        wrong("model.dropout=1.5"),
        wrong("data.name=imagenet"),
        wrong("monitor.wandb=maybe", shows="monitor.wandb"),
        wrong("zero.stage=5"),
    ),
    "sizes that do not fit each other": (
        wrong("model.num_attention_heads=5"),
        wrong("model.num_key_value_heads=3"),
        wrong("model.vocab_size=100"),
        wrong("model.max_position_embeddings=8", shows="max_position_embeddings"),
        wrong("train.global_batch=7", "train.micro_batch=2", shows="train.global_batch=7"),
        wrong("model.family=bert", shows="bert"),
        wrong("model=pretrained", "model.pretrained=./nowhere", shows="./nowhere"),
        wrong("model=custom", shows="model.target"),
        wrong("train.batch_ramp.start=3", shows="train.batch_ramp"),
    ),
    "layouts and engines": (
        wrong("parallel.tensor=3"),
        wrong("parallel.expert=2"),
        wrong("engine=local", "cluster.cpu_ranks=2", shows="engine.name=local"),
        wrong("offload=cpu", "zero=stage1", shows="offload.parameters"),
        wrong("offload=cpu_optimizer", "zero=stage0", shows="offload.optimizer"),
        wrong("precision=bf16", "zero=stage0", shows="precision.name=bf16"),
        wrong("optim.kernel=fused"),
    ),
    "keys of an engine": (
        wrong("engine.deepspeed.zero_optimization.reduce_scatter=false", shows="+engine.deepspeed"),
        wrong("+engine.deepspeed.train_batch_size=8", shows="train_batch_size"),
        wrong("+engine.deepspeed.gradient_clipping=1", shows="optim.clip"),
        wrong("+engine.deepspeed.zero_optimization.no_such_key=1", shows="no_such_key"),
        wrong("+engine.deepspeed.elasticity.enabled=true", shows="elasticity"),
        wrong("+engine.megatron.sequence_parallel=true", shows="engine.megatron"),
    ),
    "this machine, and folders": (
        wrong("cluster.nodes=2", starting_only=True),
        wrong("cluster.gpus_per_node=64", starting_only=True),
        wrong("resume=/no/such/checkpoint", starting_only=True),
        wrong("run.dir=.", shows="contains output.txt, and no run", starting_only=True),
        wrong("run.dir=/proc/x", shows="run.dir: /proc/x", starting_only=True),
        wrong("run.dir=/etc/passwd", shows="is not a folder", starting_only=True),
        wrong("run.dir=/etc/passwd/x", shows="run.dir: /etc/passwd/x", starting_only=True),
        wrong(f"run.name={'a' * 300}", shows="has at most 255 bytes", starting_only=True),
        wrong("run.fork=/no/such/run", starting_only=True),
    ),
    "custom models": (
        wrong("model=custom", "model.target=no_such_package.Model", shows="no module no_such_package"),
        wrong(
            "model=custom",
            "model.target=toolkit.no_such_module.Model",
            shows="no module toolkit.no_such_module",
        ),
        wrong(
            "model=custom",
            "model.target=toolkit.testing.tiny.sampel",
            shows="model.target=toolkit.testing.tiny.sample\n",
        ),
        wrong(
            "model=custom",
            "model.target=subprocess.getoutput",
            "+model.arguments.cmd=true",
            shows="Python's standard library",
        ),
    ),
}
