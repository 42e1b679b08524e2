# SPDX-License-Identifier: MIT
"""transformers: models, tokenizers, processors, configs, pipelines; native against cached."""

from __future__ import annotations

from typing import Any

import pytest
from fresh import Fresh
from parity.cases import Load, compare, fill

# Derived checkpoints: one kind of storage each.
MAKE = """
import json, os, shutil
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, BertModel, GenerationConfig
from transformers import AutoConfig, PreTrainedTokenizerFast, AutoTokenizer

llama = AutoModelForCausalLM.from_pretrained(tiny_llama)
llama.save_pretrained(made + "/sharded", max_shard_size="40kB")
llama.save_pretrained(made + "/outer/inner")
llama.save_pretrained(made + "/variant", variant="fp16")
os.makedirs(made + "/local_code")
with open(made + "/local_code/modeling_local.py", "w") as file:
    file.write('''
import torch
from transformers import PretrainedConfig, PreTrainedModel

class LocalConfig(PretrainedConfig):
    model_type = "local_kind"

    def __init__(self, width=4, **kwargs):
        super().__init__(**kwargs)
        self.width = width

class LocalModel(PreTrainedModel):
    config_class = LocalConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.width, config.width)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
''')
from safetensors.torch import save_file
g = torch.Generator().manual_seed(1)
save_file(
    {"layer.weight": torch.randn(4, 4, generator=g), "layer.bias": torch.randn(4, generator=g)},
    made + "/local_code/model.safetensors", {"format": "pt"},
)
with open(made + "/local_code/config.json", "w") as file:
    json.dump({"model_type": "local_kind", "width": 4, "architectures": ["LocalModel"],
               "auto_map": {"AutoConfig": "modeling_local.LocalConfig", "AutoModel": "modeling_local.LocalModel"}},
              file)

torch.manual_seed(3)
small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=57,
             max_position_embeddings=32)
BertForMaskedLM(BertConfig(**small)).save_pretrained(made + "/masked")
BertModel(BertConfig(**small)).to(torch.float16).save_pretrained(made + "/half")
stops = GenerationConfig(max_new_tokens=7, temperature=0.5, do_sample=True, eos_token_id=[1, 2])
stops.save_pretrained(made + "/generation")

hub = made + "/hub/models--o--n"
commit = "0123456789abcdef0123456789abcdef01234567"
os.makedirs(hub + "/refs")
with open(hub + "/refs/main", "w") as file:
    file.write(commit)
with open(hub + "/refs/v1", "w") as file:
    file.write(commit)
shutil.copytree(tiny_bert, hub + "/snapshots/" + commit)

import sentencepiece
with open(made + "/text.txt", "w") as file:
    file.write("\\n".join(f"the {a} {b} goes home {c} times" for a in ("red", "old", "big")
                          for b in ("cat", "dog", "fox") for c in ("two", "six", "ten")))
sentencepiece.SentencePieceTrainer.train(input=made + "/text.txt", model_prefix=made + "/spm", vocab_size=26,
                                         minloglevel=9)
from transformers import ByT5Tokenizer, SpeechT5Tokenizer, Wav2Vec2CTCTokenizer
SpeechT5Tokenizer(made + "/spm.model").save_pretrained(made + "/sentencepiece")
ByT5Tokenizer().save_pretrained(made + "/bytes")
with open(made + "/vocab.json", "w") as file:
    json.dump({t: i for i, t in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghij"])}, file)
Wav2Vec2CTCTokenizer(made + "/vocab.json").save_pretrained(made + "/letters")
tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
tokenizer.add_tokens(["<tool>", "plain added"])
tokenizer.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
tokenizer.save_pretrained(made + "/added")
"""

BATCH = "torch.tensor([[2, 7, 9, 11, 3]])"
STATES = f"[m(input_ids={BATCH}).last_hidden_state, saved(m)]"
LOGITS = f"[m(input_ids={BATCH}).logits, saved(m), m.generation_config]"
GROWN = "[m.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False), saved(m)]"
RECORDED = f"dict(m(input_ids={BATCH}, use_cache=False, output_hidden_states=True, output_attentions=True))"
TIED = (
    "[m.cls.predictions.decoder.weight is m.bert.embeddings.word_embeddings.weight,"
    f" m(input_ids={BATCH}).logits, saved(m)]"
)

MODELS = [
    Load("own_class", "transformers.BertModel.from_pretrained(tiny_bert)", STATES),
    Load("auto_model", "transformers.AutoModel.from_pretrained(tiny_bert)", STATES),
    Load("auto_causal", "transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)", GROWN),
    Load("own_causal", "transformers.LlamaForCausalLM.from_pretrained(tiny_llama)", LOGITS),
    Load("pickled_bin", "transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_bin)", LOGITS),
    Load("tied", "transformers.BertForMaskedLM.from_pretrained(made + '/masked')", TIED),
    Load("cast_up", "transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)", LOGITS),
    Load("cast_up_from_half", "transformers.BertModel.from_pretrained(made + '/half', dtype=torch.float32)", STATES),
    Load("cast_down", "transformers.BertModel.from_pretrained(tiny_bert, dtype=torch.bfloat16)", STATES),
    Load("dtype_auto", "transformers.BertModel.from_pretrained(made + '/half', dtype='auto')", STATES),
    Load("dtype_name", "transformers.BertModel.from_pretrained(tiny_bert, torch_dtype='float16')", STATES),
    Load("sharded", "transformers.AutoModelForCausalLM.from_pretrained(made + '/sharded')", LOGITS),
    Load("subfolder", "transformers.AutoModelForCausalLM.from_pretrained(made + '/outer', subfolder='inner')", LOGITS),
    Load("variant", "transformers.AutoModelForCausalLM.from_pretrained(made + '/variant', variant='fp16')", LOGITS),
    Load("path_object", "transformers.BertModel.from_pretrained(pathlib.Path(tiny_bert))", STATES, "import pathlib"),
    Load("hub_default", "transformers.BertModel.from_pretrained('o/n', cache_dir=made + '/hub')", STATES),
    Load("hub_tag", "transformers.BertModel.from_pretrained('o/n', cache_dir=made + '/hub', revision='v1')", STATES),
    Load(
        "hub_commit",
        "transformers.AutoModel.from_pretrained('o/n', cache_dir=made + '/hub', local_files_only=True,"
        " revision='0123456789abcdef0123456789abcdef01234567')",
        STATES,
    ),
    # What a class can record is noted when one of its models is made, which a hit does not do.
    Load("recorded", "transformers.LlamaModel.from_pretrained(tiny_llama, attn_implementation='eager')", RECORDED),
    Load("recorded_bert", "transformers.BertModel.from_pretrained(tiny_bert, attn_implementation='eager')", RECORDED),
    Load("eager_attention", "transformers.BertModel.from_pretrained(tiny_bert, attn_implementation='eager')", STATES),
    Load(
        "config_object",
        "transformers.BertModel.from_pretrained(tiny_bert, config=given)",
        "[m.config is given, m(input_ids=torch.tensor([[2, 7]])).last_hidden_state, describe(given)]",
        "given = transformers.BertConfig.from_pretrained(tiny_bert, hidden_act='relu')",
    ),
    Load("config_words", "transformers.BertModel.from_pretrained(tiny_bert, hidden_dropout_prob=0.3)", STATES),
    Load("loading_info", "transformers.BertModel.from_pretrained(tiny_bert, output_loading_info=True)"),
    Load(
        "unexpected_keys", "transformers.BertModel.from_pretrained(made + '/masked', add_pooling_layer=False)", STATES
    ),
    Load("device_map", "transformers.BertModel.from_pretrained(tiny_bert, device_map='cpu')", STATES),
    Load(
        "new_head",
        "transformers.BertForSequenceClassification.from_pretrained(tiny_bert, num_labels=3)",
        f"[m(input_ids={BATCH}).logits, saved(m), torch.rand(2)]",
        "torch.manual_seed(5)",
        bypass="the head that the checkpoint lacks is drawn at random",
    ),
    Load(
        "weights_given",
        "transformers.BertModel.from_pretrained(None, config=transformers.BertConfig.from_pretrained(tiny_bert),"
        " state_dict=weights)",
        f"[m(input_ids={BATCH}).last_hidden_state, describe(weights)]",
        "from safetensors.torch import load_file\nweights = load_file(tiny_bert + '/model.safetensors')",
        bypass="tensors among the arguments may share memory with the result",
    ),
    Load(
        "remote_code",
        "transformers.AutoModel.from_pretrained(made + '/local_code', trust_remote_code=True)",
        "[m(torch.ones(1, 4)), saved(m)]",
        bypass="the class is in a module that transformers makes while it loads",
    ),
]

ENCODED = (
    "[dict(m(['the red cat', 'abc <two> x'], padding=True)), len(m), m.special_tokens_map, m.decode([3, 5, 6]),"
    " saved(m)]"
)
CHAT = (
    "[m.apply_chat_template([{'role': 'user', 'content': 'hi'}], tokenize=False), m.chat_template,"
    " dict(m('a <tool> b'))]"
)

TOKENIZERS = [
    Load("bert", "transformers.BertTokenizer.from_pretrained(tiny_bert)", ENCODED),
    Load("bert_fast", "transformers.BertTokenizerFast.from_pretrained(tiny_bert)", ENCODED),
    Load("auto_bert", "transformers.AutoTokenizer.from_pretrained(tiny_bert)", ENCODED),
    Load("auto_byte_pairs", "transformers.AutoTokenizer.from_pretrained(tiny_tokenizer)", ENCODED),
    Load("fast_byte_pairs", "transformers.PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer)", ENCODED),
    Load("clip", "transformers.CLIPTokenizer.from_pretrained(tiny_pipeline, subfolder='tokenizer')", ENCODED),
    Load("sentencepiece", "transformers.SpeechT5Tokenizer.from_pretrained(made + '/sentencepiece')", ENCODED),
    Load("python_bytes", "transformers.ByT5Tokenizer.from_pretrained(made + '/bytes')", ENCODED),
    Load("python_letters", "transformers.Wav2Vec2CTCTokenizer.from_pretrained(made + '/letters')", ENCODED),
    Load("added_tokens", "transformers.AutoTokenizer.from_pretrained(made + '/added')", ENCODED),
    Load("chat_template", "transformers.AutoTokenizer.from_pretrained(made + '/added')", CHAT),
    Load(
        "words_at_load",
        "transformers.AutoTokenizer.from_pretrained(tiny_bert, padding_side='left', pad_token='x', model_max_length=9)",
        ENCODED,
    ),
    Load("hub", "transformers.AutoTokenizer.from_pretrained('o/n', cache_dir=made + '/hub')", ENCODED),
]

PIXELS = "PIL.Image.frombytes('RGB', (40, 48), bytes(i * 7 % 256 for i in range(40 * 48 * 3)))"
SEEN = f"[dict(m(images={PIXELS}, return_tensors='pt')), saved(m)]"
HEARD = "[dict(m([0.1, 0.2, -0.3], sampling_rate=8000, return_tensors='pt')), saved(m)]"

PROCESSORS = [
    Load("image", "transformers.AutoImageProcessor.from_pretrained(tiny_image_processor)", SEEN, "import PIL.Image"),
    Load(
        "image_own",
        "transformers.CLIPImageProcessorPil.from_pretrained(tiny_image_processor)",
        SEEN,
        "import PIL.Image",
    ),
    Load(
        "image_words",
        "transformers.CLIPImageProcessorPil.from_pretrained(tiny_image_processor, size={'shortest_edge': 20})",
        SEEN,
        "import PIL.Image",
    ),
    Load("feature", "transformers.AutoFeatureExtractor.from_pretrained(tiny_feature_extractor)", HEARD),
    Load("feature_own", "transformers.Wav2Vec2FeatureExtractor.from_pretrained(tiny_feature_extractor)", HEARD),
    Load(
        "processor",
        "transformers.AutoProcessor.from_pretrained(tiny_processor)",
        f"[dict(m(text=['a b'], images={PIXELS}, return_tensors='pt')), saved(m)]",
        "import PIL.Image",
    ),
    Load("processor_own", "transformers.CLIPProcessor.from_pretrained(tiny_processor)", "saved(m)"),
    Load("processor_is_tokenizer", "transformers.AutoProcessor.from_pretrained(tiny_bert)", "saved(m)"),
]

CONFIGS = [
    Load("auto", "transformers.AutoConfig.from_pretrained(tiny_llama)", "[m.to_dict(), saved(m)]"),
    Load("own", "transformers.BertConfig.from_pretrained(tiny_bert)", "[m.to_dict(), saved(m)]"),
    Load("words", "transformers.AutoConfig.from_pretrained(tiny_bert, hidden_size=8, return_unused_kwargs=True, x=1)"),
    Load(
        "generation", "transformers.GenerationConfig.from_pretrained(made + '/generation')", "[m.to_dict(), saved(m)]"
    ),
    Load(
        "generation_of_model", "transformers.GenerationConfig.from_pretrained(tiny_llama, max_new_tokens=3)", "saved(m)"
    ),
]

PIPELINES = [
    Load(
        "features",
        "transformers.pipeline('feature-extraction', model=tiny_bert)",
        "[m('the red cat'), m.task, describe(m.model), m.model is m.model.base_model]",
    ),
    Load(
        "text",
        "transformers.pipeline('text-generation', model=tiny_llama, tokenizer=tiny_llama, dtype=torch.float32)",
        "m('ab', max_new_tokens=3, do_sample=False)",
    ),
    Load(
        "parts_given",
        "transformers.pipeline('feature-extraction', model=own, tokenizer=tok)",
        "[m('the red cat'), m.model is own, m.tokenizer is tok]",
        "own = transformers.BertModel.from_pretrained(tiny_bert)\n"
        "tok = transformers.AutoTokenizer.from_pretrained(tiny_bert)",
        bypass="pipeline() changes the model that it is given",
    ),
]


TABLES = {
    "model": MODELS,
    "tokenizer": TOKENIZERS,
    "processor": PROCESSORS,
    "config": CONFIGS,
    "pipeline": PIPELINES,
}
ROWS = [pytest.param(load, id=f"{table}-{load.name}") for table, loads in TABLES.items() for load in loads]


@pytest.fixture(scope="module")
def made(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> str:
    return fill(fresh, tmp_path_factory.mktemp("transformers"), MAKE)


@pytest.mark.parametrize("load", ROWS)
def test_transformers(load: Load, oracle: Any, made: str) -> None:
    compare(oracle, load.prepared("import transformers"), made)
