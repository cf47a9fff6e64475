//! Quantised weights in every known form: each parameter follows its weight's split, and ranks are the checkpoint again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    Coordinate, Image, LayoutOptions, ModelPart, PackOptions, Parallel, Target, UnpackOptions, pack_ranks,
    reshard, unpack,
};
use flashboot_core::Dtype;
use serde_json::json;
use support::models::{Model, Sizes, gpt_oss, llama};
use support::{Made, open, tensor, tree};
use tempfile::TempDir;

/// Outputs and inputs of the module that is looked at: `up_proj` is `[OUT, IN]`, `down_proj` `[IN, OUT]`.
const OUT: u64 = 96;
const IN: u64 = 64;

/// One parameter of a module of `o` outputs and `i` inputs.
struct Parameter {
    name: &'static str,
    dtype: Dtype,
    shape: fn(u64, u64) -> Vec<u64>,
    /// The dimension that follows outputs and the one that follows inputs; the others are whole.
    outputs: Option<usize>,
    inputs: Option<usize>,
}

fn parameter(
    name: &'static str,
    dtype: Dtype,
    shape: fn(u64, u64) -> Vec<u64>,
    outputs: Option<usize>,
    inputs: Option<usize>,
) -> Parameter {
    Parameter { name, dtype, shape, outputs, inputs }
}

/// A Llama whose linear layers have these parameters instead of their weight.
fn quantised(config: serde_json::Value, parameters: &[Parameter]) -> Model {
    let sizes =
        Sizes { layers: 1, hidden: IN, heads: 8, kv_heads: 4, head: 16, mlp: OUT, ..Sizes::default() };
    let plain = llama(&sizes);
    let mut model = Model { config: plain.config, tensors: Vec::new() };
    model.set("quantization_config", config);
    for made in plain.tensors {
        let Some(module) = made.name.strip_suffix("_proj.weight") else {
            model.tensors.push(made);
            continue;
        };
        for p in parameters {
            let shape = (p.shape)(made.shape[0], made.shape[1]);
            model.tensors.push(tensor(&format!("{module}_proj.{}", p.name), p.dtype, &shape));
        }
    }
    model
}

/// Part `k` of two of a tensor along a dimension, by hand.
fn half(made: &Made, dim: usize, k: u64) -> (Vec<u64>, Vec<u8>) {
    let mut shape = made.shape.clone();
    shape[dim] /= 2;
    let inner: u64 = made.shape[dim + 1..].iter().product::<u64>() * made.dtype.bits() / 8;
    let block = (made.shape[dim] * inner) as usize;
    let (from, to) = ((k * shape[dim] * inner) as usize, ((k + 1) * shape[dim] * inner) as usize);
    (shape, made.bytes.chunks(block).flat_map(|b| b[from..to].to_vec()).collect())
}

fn layout(tp: u32) -> LayoutOptions {
    LayoutOptions { parallel: Parallel { tp, ..Parallel::default() }, ..LayoutOptions::default() }
}

fn check(config: serde_json::Value, parameters: &[Parameter]) {
    let what = config.to_string();
    let model = quantised(config, parameters);
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    model.write(&path("m"), 2);
    let pack = |name: &str, layout: &LayoutOptions| {
        pack_ranks(&open(&path("m")).unwrap(), &path(name), layout, &PackOptions::default(), &())
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        Image::open(&path(name)).unwrap()
    };
    let two = pack("2", &layout(2));
    for tp in 0..2u64 {
        let coordinate = Coordinate { model: ModelPart::Target, pp: 0, tp: tp as u32, ep: 0, dp: 0 };
        let rank = two.rank(coordinate).unwrap();
        let payload = std::fs::read(&rank.path).unwrap();
        for p in parameters {
            for (module, dim) in [("up", p.outputs), ("down", p.inputs)] {
                let name = format!("model.layers.0.mlp.{module}_proj.{}", p.name);
                let made = model.find(&name);
                let wanted = match dim {
                    Some(dim) => half(made, dim, tp),
                    None => (made.shape.clone(), made.bytes.clone()),
                };
                let found = rank.table.at(rank.table.find(&name).unwrap()).unwrap();
                let bytes = payload[found.offset as usize..(found.offset + found.bytes) as usize].to_vec();
                assert_eq!((found.shape.to_vec(), bytes), wanted, "{what}: {name} on rank {tp}");
            }
        }
    }
    unpack(&two, &path("back"), &UnpackOptions::default(), &()).unwrap();
    let mut files = tree(&path("m"));
    files.remove(std::path::Path::new("config.json"));
    assert!(tree(&path("back")) == files, "{what}: unpacked ranks are the checkpoint");
    pack("4", &layout(4));
    reshard(&two, &path("r"), &layout(4), &PackOptions::default(), &()).unwrap();
    assert!(tree(&path("r")) == tree(&path("4")), "{what}: resharded is packed");
    // Fused as an engine has them, they are put together along their own outputs.
    let vllm = LayoutOptions { target: Target::Vllm, experimental: true, ..layout(2) };
    let fused = pack("v", &vllm);
    let rank = fused.ranks().first().unwrap();
    let payload = std::fs::read(&rank.path).unwrap();
    for p in parameters.iter().filter(|p| p.outputs.is_some()) {
        let gate_up = format!("model.layers.0.mlp.gate_up_proj.{}", p.name);
        let found = rank.table.at(rank.table.find(&gate_up).unwrap()).unwrap();
        let dim = p.outputs.unwrap();
        let part =
            |name: &str| half(model.find(&format!("model.layers.0.mlp.{name}_proj.{}", p.name)), dim, 0);
        let ((shape, gate), (_, up)) = (part("gate"), part("up"));
        let row = |bytes: &[u8]| bytes.len() / shape[..dim].iter().product::<u64>() as usize;
        let (g, u) = (gate.chunks(row(&gate)), up.chunks(row(&up)));
        let wanted: Vec<u8> = g.zip(u).flat_map(|(g, u)| [g, u].concat()).collect();
        let bytes = &payload[found.offset as usize..(found.offset + found.bytes) as usize];
        assert!(bytes == wanted && found.shape[dim] == 2 * shape[dim], "{what}: {gate_up}");
    }
}

#[test]
fn fp8_per_tensor_per_channel_and_in_blocks() {
    let weight = || parameter("weight", Dtype::F8E4M3, |o, i| vec![o, i], Some(0), Some(1));
    let input = || parameter("input_scale", Dtype::F32, |_, _| vec![], None, None);
    check(
        json!({ "quant_method": "fp8", "activation_scheme": "static" }),
        &[weight(), parameter("weight_scale", Dtype::F32, |_, _| vec![], None, None), input()],
    );
    let channel = parameter("weight_scale", Dtype::F32, |o, _| vec![o, 1], Some(0), None);
    let tensors = json!({ "weights": { "num_bits": 8, "type": "float", "strategy": "channel" } });
    check(
        json!({ "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": { "group_0": tensors } }),
        &[weight(), channel],
    );
    let blocks = parameter("weight_scale_inv", Dtype::F32, |o, i| vec![o / 8, i / 8], Some(0), Some(1));
    check(json!({ "quant_method": "fp8", "weight_block_size": [8, 8] }), &[weight(), blocks]);
}

#[test]
fn mxfp8_mxfp4_and_nvfp4() {
    let scales = |name| parameter(name, Dtype::F8E8M0, |o, i| vec![o, i / 16], Some(0), Some(1));
    check(
        json!({ "quant_method": "mxfp8" }),
        &[parameter("weight", Dtype::F8E4M3, |o, i| vec![o, i], Some(0), Some(1)), scales("weight_scale")],
    );
    // Two to a byte.
    let packed = |name| parameter(name, Dtype::U8, |o, i| vec![o, i / 2], Some(0), Some(1));
    check(json!({ "quant_method": "mxfp4" }), &[packed("weight"), scales("weight_scale")]);
    check(
        json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" }),
        &[
            packed("weight"),
            parameter("weight_scale", Dtype::F8E4M3, |o, i| vec![o, i / 16], Some(0), Some(1)),
            parameter("weight_scale_2", Dtype::F32, |_, _| vec![], None, None),
            parameter("input_scale", Dtype::F32, |_, _| vec![], None, None),
        ],
    );
    let group = json!({ "weights": { "num_bits": 4, "type": "float", "group_size": 16 } });
    check(
        json!({ "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": { "g": group } }),
        &[
            packed("weight_packed"),
            parameter("weight_scale", Dtype::F8E4M3, |o, i| vec![o, i / 16], Some(0), Some(1)),
            parameter("weight_global_scale", Dtype::F32, |_, _| vec![1], None, None),
            parameter("input_global_scale", Dtype::F32, |_, _| vec![1], None, None),
        ],
    );
}

#[test]
fn awq_gptq_and_packed_words() {
    check(
        json!({ "quant_method": "awq", "bits": 4, "group_size": 16 }),
        &[
            parameter("qweight", Dtype::I32, |o, i| vec![i, o / 8], Some(1), Some(0)),
            parameter("qzeros", Dtype::I32, |o, i| vec![i / 16, o / 8], Some(1), Some(0)),
            parameter("scales", Dtype::F16, |o, i| vec![i / 16, o], Some(1), Some(0)),
        ],
    );
    let gptq = |ordered: bool| {
        let groups = (!ordered).then_some(0);
        vec![
            parameter("qweight", Dtype::I32, |o, i| vec![i / 8, o], Some(1), Some(0)),
            parameter("qzeros", Dtype::I32, |o, i| vec![i / 16, o / 8], Some(1), groups),
            parameter("scales", Dtype::F16, |o, i| vec![i / 16, o], Some(1), groups),
            parameter("g_idx", Dtype::I32, |_, i| vec![i], None, Some(0)),
        ]
    };
    for ordered in [false, true] {
        let config = json!({ "quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": ordered });
        check(config, &gptq(ordered));
    }
    let group = json!({ "weights": { "num_bits": 4, "type": "int", "group_size": 16 } });
    check(
        json!({ "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": { "g": group } }),
        &[
            parameter("weight_packed", Dtype::I32, |o, i| vec![o, i / 8], Some(0), Some(1)),
            parameter("weight_scale", Dtype::Bf16, |o, i| vec![o, i / 16], Some(0), Some(1)),
            parameter("weight_zero_point", Dtype::I32, |o, i| vec![o / 8, i / 16], Some(0), Some(1)),
            parameter("weight_shape", Dtype::I64, |_, _| vec![2], None, None),
        ],
    );
}

#[test]
fn words_are_not_cut_inside() {
    let model = quantised(
        json!({ "quant_method": "awq", "bits": 4, "group_size": 16 }),
        &[
            parameter("qweight", Dtype::I32, |o, i| vec![i, o / 8], Some(1), Some(0)),
            parameter("qzeros", Dtype::I32, |o, i| vec![i / 16, o / 8], Some(1), Some(0)),
            parameter("scales", Dtype::F16, |o, i| vec![i / 16, o], Some(1), Some(0)),
        ],
    );
    let dir = TempDir::new().unwrap();
    model.write(dir.path(), 1);
    // 96 outputs over 8 ranks are 12 each: a word and a half.
    let mut layout = layout(8);
    layout.experimental = true;
    let e =
        pack_ranks(&open(dir.path()).unwrap(), &dir.path().join("i"), &layout, &PackOptions::default(), &());
    let text = e.unwrap_err().to_string();
    assert!(text.contains("up_proj.qweight (12 is no multiple of 8)"), "{text}");
}

#[test]
fn stacked_mxfp4_experts_are_cut_by_output_and_by_group_of_inputs() {
    let sizes = Sizes { layers: 1, hidden: 64, mlp: 128, experts: 4, ..Sizes::default() };
    let mut model = gpt_oss(&sizes);
    model.set("quantization_config", json!({ "quant_method": "mxfp4" }));
    let experts = "model.layers.0.mlp.experts";
    model
        .tensors
        .retain(|t| !t.name.ends_with("experts.gate_up_proj") && !t.name.ends_with("experts.down_proj"));
    for (name, outputs, inputs) in [("gate_up_proj", 256, 64), ("down_proj", 64, 128)] {
        model.add(&format!("{experts}.{name}_blocks"), Dtype::U8, &[4, outputs, inputs / 32, 16]);
        model.add(&format!("{experts}.{name}_scales"), Dtype::U8, &[4, outputs, inputs / 32]);
    }
    let dir = TempDir::new().unwrap();
    model.write(&dir.path().join("m"), 2);
    let parallel = Parallel { tp: 4, ep: 2, ..Parallel::default() };
    let layout = LayoutOptions { parallel, experimental: true, ..LayoutOptions::default() };
    pack_ranks(
        &open(&dir.path().join("m")).unwrap(),
        &dir.path().join("i"),
        &layout,
        &PackOptions::default(),
        &(),
    )
    .unwrap();
    let image = Image::open(&dir.path().join("i")).unwrap();
    let rank = image.rank(Coordinate { model: ModelPart::Target, pp: 0, tp: 3, ep: 1, dp: 0 }).unwrap();
    let payload = std::fs::read(&rank.path).unwrap();
    for (name, dim) in [
        ("gate_up_proj_blocks", Some(1)),
        ("gate_up_proj_scales", Some(1)),
        ("gate_up_proj_bias", Some(1)),
        ("down_proj_blocks", Some(2)),
        ("down_proj_scales", Some(2)),
        ("down_proj_bias", None),
    ] {
        let made = model.find(&format!("{experts}.{name}"));
        // The second half of the experts, then the second half of what is cut.
        let (shape, bytes) = half(made, 0, 1);
        let own = Made { name: made.name.clone(), dtype: made.dtype, shape, bytes };
        let wanted = dim.map_or((own.shape.clone(), own.bytes.clone()), |dim| half(&own, dim, 1));
        let found = rank.table.at(rank.table.find(&made.name).unwrap()).unwrap();
        let bytes = payload[found.offset as usize..(found.offset + found.bytes) as usize].to_vec();
        assert_eq!((found.shape.to_vec(), bytes), wanted, "{name}");
    }
    unpack(&image, &dir.path().join("b"), &UnpackOptions::default(), &()).unwrap();
    let mut files = tree(&dir.path().join("m"));
    files.remove(std::path::Path::new("config.json"));
    assert!(tree(&dir.path().join("b")) == files);
}
