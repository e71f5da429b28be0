"""Loads and checks a run's inputs: batch maths, tokenizer, chat format, problems and the model's shape.

Everything here is refused, with one line, before anything is written, built or put on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config, ConfigError, ModelConfig
from configs.paths import places
from run.files import say

OWN_FOLDERS = ("configs", "data", "models", "runs")

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from data import Problem, TrainingData
    from rollout.chat.formats import Chat


def check_batch(config: Config, world_size: int) -> None:
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    if prompts % world_size:
        good = [n * world_size * samples for n in (prompts // world_size, prompts // world_size + 1) if n]
        raise ConfigError(
            "rollout.trajectories_per_step", config.rollout.trajectories_per_step,
            f"gives {prompts} prompts a step, which {world_size} processes cannot share equally; "
            f"set {' or '.join(map(str, good))}",
        )  # fmt: skip


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    name = "tokenizer_path" if config.model.tokenizer_path else "path"
    tokenizer = from_hub(f"model.{name}", getattr(config.model, name), AutoTokenizer)
    if config.model.chat_template:
        tokenizer.chat_template = _template(config.model.chat_template)
    return tokenizer


def dated(config: Config, tokenizer: PreTrainedTokenizerBase) -> Config:
    """The config with today's date where the chat template asks for one and none is set: the run's from here on."""
    from rollout.chat.formats import asks_for_a_date

    model = config.model
    if model.current_date or not asks_for_a_date(tokenizer) or _family(config) == "gpt_oss":
        return config
    return dataclasses.replace(config, model=dataclasses.replace(model, current_date=date.today().isoformat()))


def _family(config: Config) -> str:
    """The model type. Raises ConfigError."""
    from transformers import AutoConfig

    from modeling.loading import shape_source

    return str(from_hub("model.path", shape_source(config.model), AutoConfig).model_type)


def _template(name: str) -> str:
    """The text of a chat template. Raises ConfigError."""
    try:
        return next((place for place in places(name) if place.is_file()), Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(
            "model.chat_template", name, f"cannot be read ({reason}); name a file with a Jinja template"
        ) from error


def load_chat(config: Config, tokenizer: PreTrainedTokenizerBase, own: Sequence[Mapping[str, Any]] = ()) -> Chat:
    """The chat format of the model's family, probed. Raises ConfigError or ChatTemplateError.

    own: schemas of the user's tools, offered where the config has any
    """
    from rollout.chat.formats import make_chat
    from tools import tool_schema

    tools = [*([tool_schema(config.tool)] if config.tool.enabled else []), *(own if config.tool.has_own else ())]
    return make_chat(_family(config), tokenizer, tools, config.model)


def load_data(config: Config, chat: Chat, path: str, once: bool = False) -> TrainingData:
    """The problems of a file with their rendered prompts. Raises DataError or ConfigError.

    once: keep the first line of each prompt alone, as an evaluation needs
    """
    from data import TrainingData, distinct, duplicates, load_problems, render_prompts

    render = _renderer(config, chat)
    fields = dataclasses.replace(config.data, hint_field="") if once else config.data
    box_rule = not config.reward.function
    problems = load_problems(path, fields, "eval.path" if once else "data.path", box_rule)
    repeated = duplicates(problems, path) if box_rule else None  # else rows of one prompt may differ elsewhere
    if repeated:
        tell(f"note: {repeated}{'; each counts once' if once else ''}")
    problems = distinct(problems) if once and box_rule else problems
    limit = config.rollout.context_length - 1
    kept, prompts = render_prompts(problems, render, limit, config.data.over_long_prompts, path)
    data = TrainingData(kept, prompts, whole_rows=not box_rule)
    if len(data.problems) < len(problems):
        left_out = len(problems) - len(data.problems)
        tell(f"note: {path}: {left_out} of {len(problems)} prompts are longer than {limit} tokens and left out")
    wanted, present = config.rollout.prompts_per_step, len(data.problems)
    if wanted > present and not once:
        tell(f"note: a step takes {wanted} prompts, {path} has {present}; each step has some of them more than once")
    return data


def _renderer(config: Config, chat: Chat) -> Callable[..., list[int]]:
    """Token ids of a problem's prompt, with `more` after its last user turn.

    data.system_prompt stands before it, unless the problem's messages begin with a system message of their own.
    """
    system = [{"role": "system", "content": config.data.system_prompt}] if config.data.system_prompt else []

    def render(problem: Problem, more: str = "") -> list[int]:
        *before, last = problem.messages or [{"role": "user", "content": problem.prompt}]
        own = bool(before) and before[0]["role"] == "system"
        return chat.prompt_ids(
            [*(() if own else system), *before, {"role": "user", "content": last["content"] + more}]
        )

    return render


def add_teacher_prompts(config: Config, chat: Chat, data: TrainingData, shape: PretrainedConfig) -> TrainingData:
    """Adds what a privileged teacher reads in place of each prompt; without teacher.privilege returns `data`.

    shape: the teacher's Hugging Face config
    """
    from update.teacher import privileged

    template = config.teacher.privilege
    if config.loss.distill_weight == 0 or not template:
        return data
    render = _renderer(config, chat)
    prompts = [render(problem, privileged(template, problem)) for problem in data.problems]
    more = max(len(longer) - len(prompt) for longer, prompt in zip(prompts, data.prompts, strict=True))
    if config.rollout.context_length + more > shape.max_position_embeddings:
        raise ConfigError(
            "teacher.privilege", template, f"adds up to {more} tokens to rollout.context_length="
            f"{config.rollout.context_length}, more than the teacher's max_position_embeddings="
            f"{shape.max_position_embeddings}; shorten it, or lower rollout.context_length",
        )  # fmt: skip
    return dataclasses.replace(data, teacher_prompts=prompts)


def tell(text: str) -> None:
    """Prints a line from rank 0."""
    if os.environ.get("RANK", "0") == "0":
        say(text)


def check_model(config: Config, adapters: Path | None = None) -> PretrainedConfig:
    """The model's shape, from its config.json alone. adapters: folder of LoRA adapters to be sampled through."""
    from modeling import lora

    lora.check_available(config.lora)
    if adapters:
        lora.check_readable(adapters)
    shape = _shape("model.path", config.model, config.rollout.context_length)
    experts = getattr(shape, "num_local_experts", 0)
    if config.model.router_replay and not experts:
        raise ConfigError("model.router_replay", True, f"{shape.model_type} has no experts to replay; set false")
    if config.loss.router_balance and not experts:
        value = config.loss.router_balance
        raise ConfigError("loss.router_balance", value, f"{shape.model_type} has no experts to balance; set 0")
    return shape


def check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig | None:
    """The shape of a teacher with weights of its own, else None. Its vocabulary must be the policy's.

    Heads of different lengths are allowed where both tokenizers give every token the same id: models of one family pad
    their heads differently, and the extra rows belong to no token.
    """
    if config.loss.distill_weight == 0:
        return None
    from transformers import AutoTokenizer

    own_size, top_k = (
        _shape("model.path", config.model, config.rollout.context_length).vocab_size,
        config.teacher.top_k,
    )
    if config.teacher.source != "model":
        if top_k >= own_size:
            raise ConfigError(
                "teacher.top_k", top_k, f"the policy has a vocabulary of {own_size}; set less, or 0 for all of it"
            )
        return None
    theirs = _shape("teacher.path", config.teacher_model, config.rollout.context_length)
    sizes = (theirs.vocab_size, own_size)
    fix = "a teacher must share the policy's tokenizer; name one of the same family"
    said = f"the teacher has a vocabulary of {sizes[0]}, the policy one of {sizes[1]}"
    if config.model.random_weights:  # no tokenizer comes with a shape
        if sizes[0] != sizes[1]:
            raise ConfigError("teacher.path", config.teacher.path, f"{said}; {fix}")
    else:
        ids, own = from_hub("teacher.path", config.teacher.path, AutoTokenizer).get_vocab(), tokenizer.get_vocab()
        if ids != own:
            word = min((own.items() ^ ids.items()), key=lambda pair: (pair[1], pair[0]))[0]
            text = f"{said}, and tokenizers of {len(ids)} and {len(own)} tokens give {word!r} the ids "
            raise ConfigError("teacher.path", config.teacher.path, f"{text}{ids.get(word)} and {own.get(word)}; {fix}")
        if sizes[0] != sizes[1]:
            tell(f"{said}; their tokenizers are equal, so the first {min(sizes)} are compared")
    if top_k >= min(sizes):
        raise ConfigError("teacher.top_k", top_k, f"{said}; set less, or 0 for all of it")
    return theirs


def _shape(name: str, model: ModelConfig, context_length: int) -> PretrainedConfig:
    """The Hugging Face config of a model that we can run over `context_length` tokens. Raises ConfigError."""
    from transformers import AutoConfig

    from modeling.families import check_supported
    from modeling.loading import check_quantization, shape_source

    shape = from_hub(name, shape_source(model), AutoConfig)
    try:
        check_supported(shape)
        check_quantization(shape)
    except ValueError as error:
        raise ConfigError(name, model.path, str(error)) from error
    if context_length > shape.max_position_embeddings:
        whose = name.partition(".")[0]
        raise ConfigError(
            "rollout.context_length", context_length,
            f"is more than the {whose}'s max_position_embeddings={shape.max_position_embeddings}; lower it",
        )  # fmt: skip
    return shape


def _may_be_on_the_hub(path: str) -> bool:
    """Whether to ask the hub for what is no folder; it may take a minute to say no. Our own folders' names are not."""
    return path.count("/") == 1 and path[0] not in "/.~" and path.partition("/")[0] not in OWN_FOLDERS


def from_hub(name: str, path: str, loader: Any) -> Any:
    from transformers import AutoTokenizer

    folder, tried = Path(path).is_dir(), ", ".join(map(str, places(path)))
    if not folder and not _may_be_on_the_hub(path):
        fix = f"is neither a folder nor a hub name of the form organisation/model; tried {tried}"
        raise ConfigError(name, path, fix)
    if loader is not AutoTokenizer and (Path(path) / "adapter_config.json").exists():
        raise ConfigError(
            name, path, "holds LoRA adapters and no model; score them with main.py evaluate --checkpoint, or merge "
            "them into their base with peft's merge_and_unload, save that, and name its folder",
        )  # fmt: skip
    try:
        return loader.from_pretrained(path)
    except (OSError, ValueError) as error:
        where = "cannot be loaded" if folder else f"is no folder (tried {tried}), and as a hub name cannot be loaded"
        raise ConfigError(name, path, f"{where}: {str(error).splitlines()[0]}") from error
