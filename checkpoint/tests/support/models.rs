//! Small models of known families, with bytes that differ everywhere.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use super::{Made, sharded, tensor};
use flashboot_core::Dtype;
use std::path::Path;

/// A small model.
#[derive(Debug, Clone, Default)]
pub struct Model {
    pub config: serde_json::Map<String, serde_json::Value>,
    pub tensors: Vec<Made>,
}

impl Model {
    fn new(model_type: &str) -> Self {
        let mut model = Self::default();
        model.set("model_type", model_type);
        model
    }

    pub fn set(&mut self, key: &str, value: impl Into<serde_json::Value>) {
        self.config.insert(key.into(), value.into());
    }

    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[u64]) {
        self.tensors.push(tensor(name, dtype, shape));
    }

    /// A weight, and where `block` says so in FP8 with a scale for each block.
    fn weight(&mut self, name: &str, shape: &[u64], block: Option<u64>) {
        match block {
            None => self.add(&format!("{name}.weight"), Dtype::Bf16, shape),
            Some(block) => {
                let scale: Vec<_> = shape.iter().map(|d| d.div_ceil(block)).collect();
                self.add(&format!("{name}.weight"), Dtype::F8E4M3, shape);
                self.add(&format!("{name}.weight_scale_inv"), Dtype::F32, &scale);
            }
        }
    }

    /// Written as `shards` shards, tensors in a fixed but mixed order.
    pub fn write(&self, dir: &Path, shards: usize) {
        let mut parts = vec![Vec::new(); shards];
        for (i, made) in self.tensors.iter().enumerate() {
            parts[(i * 7 + i / 3) % shards].push(made.clone());
        }
        sharded(dir, &parts);
        std::fs::write(dir.join("config.json"), serde_json::to_string(&self.config).unwrap()).unwrap();
    }

    pub fn find(&self, name: &str) -> &Made {
        self.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }
}

/// The sizes of a small model.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head: u64,
    pub mlp: u64,
    pub experts: u64,
    pub vocab: u64,
    /// FP8 blocks of this size instead of bfloat16.
    pub block: Option<u64>,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            layers: 4,
            hidden: 32,
            heads: 8,
            kv_heads: 2,
            head: 4,
            mlp: 48,
            experts: 8,
            vocab: 50,
            block: None,
        }
    }
}

fn facts(model: &mut Model, s: &Sizes, experts_key: Option<&str>) {
    model.set("num_hidden_layers", s.layers);
    model.set("num_attention_heads", s.heads);
    model.set("num_key_value_heads", s.kv_heads);
    if let Some(key) = experts_key {
        model.set(key, s.experts);
    }
    if let Some(block) = s.block {
        let config = serde_json::json!({ "quant_method": "fp8", "weight_block_size": [block, block] });
        model.set("quantization_config", config);
    }
}

fn shell(model: &mut Model, s: &Sizes, layer: impl Fn(&mut Model, &str)) {
    model.add("model.embed_tokens.weight", Dtype::Bf16, &[s.vocab, s.hidden]);
    for l in 0..s.layers {
        let at = format!("model.layers.{l}");
        model.add(&format!("{at}.input_layernorm.weight"), Dtype::Bf16, &[s.hidden]);
        model.add(&format!("{at}.post_attention_layernorm.weight"), Dtype::Bf16, &[s.hidden]);
        layer(model, &at);
    }
    model.add("model.norm.weight", Dtype::Bf16, &[s.hidden]);
    model.add("lm_head.weight", Dtype::Bf16, &[s.vocab, s.hidden]);
}

fn attention(model: &mut Model, s: &Sizes, at: &str) {
    for (name, heads) in [("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)] {
        model.weight(&format!("{at}.self_attn.{name}_proj"), &[heads * s.head, s.hidden], s.block);
    }
    model.weight(&format!("{at}.self_attn.o_proj"), &[s.hidden, s.heads * s.head], s.block);
}

fn gated(model: &mut Model, s: &Sizes, at: &str, names: [&str; 3]) {
    for name in &names[..2] {
        model.weight(&format!("{at}.{name}"), &[s.mlp, s.hidden], s.block);
    }
    model.weight(&format!("{at}.{}", names[2]), &[s.hidden, s.mlp], s.block);
}

const GATED: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

pub fn llama(s: &Sizes) -> Model {
    let mut model = Model::new("llama");
    facts(&mut model, s, None);
    shell(&mut model, s, |model, at| {
        attention(model, s, at);
        gated(model, s, &format!("{at}.mlp"), GATED);
    });
    model
}

pub fn qwen3_moe(s: &Sizes) -> Model {
    let mut model = Model::new("qwen3_moe");
    facts(&mut model, s, Some("num_experts"));
    shell(&mut model, s, |model, at| {
        attention(model, s, at);
        for norm in ["q_norm", "k_norm"] {
            model.add(&format!("{at}.self_attn.{norm}.weight"), Dtype::Bf16, &[s.head]);
        }
        model.add(&format!("{at}.mlp.gate.weight"), Dtype::Bf16, &[s.experts, s.hidden]);
        (0..s.experts).for_each(|e| gated(model, s, &format!("{at}.mlp.experts.{e}"), GATED));
    });
    model
}

pub fn mixtral(s: &Sizes) -> Model {
    let mut model = Model::new("mixtral");
    facts(&mut model, s, Some("num_local_experts"));
    shell(&mut model, s, |model, at| {
        attention(model, s, at);
        model.add(&format!("{at}.block_sparse_moe.gate.weight"), Dtype::Bf16, &[s.experts, s.hidden]);
        (0..s.experts)
            .for_each(|e| gated(model, s, &format!("{at}.block_sparse_moe.experts.{e}"), ["w1", "w3", "w2"]));
    });
    model
}

/// Experts stacked: in bfloat16 `[experts, inputs, outputs]`.
pub fn gpt_oss(s: &Sizes) -> Model {
    let mut model = Model::new("gpt_oss");
    facts(&mut model, &Sizes { block: None, ..*s }, Some("num_local_experts"));
    shell(&mut model, s, |model, at| {
        attention(model, &Sizes { block: None, ..*s }, at);
        model.add(&format!("{at}.self_attn.sinks"), Dtype::Bf16, &[s.heads]);
        model.add(&format!("{at}.mlp.router.weight"), Dtype::Bf16, &[s.experts, s.hidden]);
        model.add(&format!("{at}.mlp.router.bias"), Dtype::Bf16, &[s.experts]);
        let experts = format!("{at}.mlp.experts");
        model.add(&format!("{experts}.gate_up_proj"), Dtype::Bf16, &[s.experts, s.hidden, 2 * s.mlp]);
        model.add(&format!("{experts}.gate_up_proj_bias"), Dtype::Bf16, &[s.experts, 2 * s.mlp]);
        model.add(&format!("{experts}.down_proj"), Dtype::Bf16, &[s.experts, s.mlp, s.hidden]);
        model.add(&format!("{experts}.down_proj_bias"), Dtype::Bf16, &[s.experts, s.hidden]);
    });
    model
}
