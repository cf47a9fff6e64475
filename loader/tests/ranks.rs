//! Stock checkpoints: what each rank reads, keeps, is given and is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

#[path = "../../checkpoint/tests/support/mod.rs"]
mod support;

use flashboot_checkpoint::{
    Checkpoint, Coordinate, CostOptions, Image, LayoutOptions, ModelPart, PackOptions, Parallel, RankPlan,
    pack_ranks, plan,
};
use flashboot_core::{ArenaSpec, ByteSize, Dtype, Kind};
use flashboot_loader::{
    budget::Budget,
    io::{Engine, Io, IoConfig},
    pipeline::{FillConfig, Proof},
    ranks::{Access, PartialTensor, ReadPlan, StreamConfig, Tensor, TensorStream},
    slab::{SlabConfig, SlabPool},
    source::{CheckpointSource, ImageSource, Load, Source, SourceKind, Wanted},
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{path::Path, time::Duration};
use support::models::{Model, Sizes, gpt_oss, llama, mixtral, qwen3_moe};
use tempfile::TempDir;

fn layout(tp: u32, dp: u32, ep: u32, pp: u32) -> LayoutOptions {
    LayoutOptions { parallel: Parallel { tp, dp, ep, pp, moe_tp: None }, ..LayoutOptions::default() }
}

/// What a deepseek_v4 checkpoint looks like: experts, tables that no GPU loads, and a draft in a shard of its own.
fn deepseek(dir: &Path) -> Checkpoint {
    let mut model = Model::default();
    model.set("model_type", "deepseek_v4");
    model.set("n_routed_experts", 4);
    let experts = |model: &mut Model, at: &str| {
        for e in 0..4 {
            for (w, rows, columns) in [("w1", 32, 64), ("w3", 32, 64), ("w2", 64, 32)] {
                model.add(&format!("{at}.ffn.experts.{e}.{w}.weight"), Dtype::I8, &[rows, columns]);
                model.add(&format!("{at}.ffn.experts.{e}.{w}.scale"), Dtype::F8E8M0, &[rows, columns / 16]);
            }
        }
        model.add(&format!("{at}.attn.wq.weight"), Dtype::Bf16, &[64, 33]);
    };
    model.add("embed.weight", Dtype::Bf16, &[100, 64]);
    model.add("head.weight", Dtype::Bf16, &[100, 64]);
    model.add("norm.weight", Dtype::F32, &[64]);
    model.add("engram.table", Dtype::Bf16, &[1000, 64]);
    (0..2).for_each(|l| experts(&mut model, &format!("layers.{l}")));
    let target = model.tensors.len();
    experts(&mut model, "mtp.0");
    let (target, draft) = model.tensors.split_at(target);
    support::sharded(dir, &[target[..20].to_vec(), target[20..].to_vec(), draft.to_vec()]);
    std::fs::write(dir.join("config.json"), serde_json::to_string(&model.config).unwrap()).unwrap();
    support::open(dir).unwrap()
}

fn config(engine: Engine) -> FillConfig {
    let io = IoConfig { engine, piece: ByteSize(8192), ..IoConfig::default() };
    FillConfig { threads: 3, ..FillConfig::new(&io).unwrap() }
}

fn coordinates(checkpoint: &Checkpoint, layout: &LayoutOptions) -> Vec<Coordinate> {
    let all = plan(checkpoint, layout, &CostOptions::default()).unwrap().ranks;
    let draft = |r: &flashboot_checkpoint::RankCost| {
        r.draft.as_ref().map(|_| Coordinate { model: ModelPart::Draft, ..r.coordinate })
    };
    all.iter().map(|r| r.coordinate).chain(all.iter().filter_map(draft)).collect()
}

fn wanted(image: &Image, coordinate: Coordinate) -> Wanted {
    let rank = image.rank(coordinate).unwrap();
    let digests = rank.table.digests().clone().into();
    let payload = rank.payload_bytes;
    Wanted { image: Some(image.id().into()), rank: coordinate.to_string(), payload, digests }
}

fn load(wanted: Wanted, engine: Engine) -> Load {
    let payload = wanted.payload;
    Load::new(wanted, config(engine), move || {
        Ok(HostArena::create(ArenaSpec { payload, shards: 1 }, &HostArenaConfig::default())?.0 as _)
    })
}

/// Loads every rank of `layout` straight from the checkpoint and holds it to the digests of what packing wrote.
fn straight(checkpoint: &Checkpoint, layout: &LayoutOptions, dir: &Path) {
    let image = dir.join("image");
    pack_ranks(checkpoint, &image, layout, &PackOptions::default(), &()).unwrap();
    let image = Image::open(&image).unwrap();
    for coordinate in coordinates(checkpoint, layout) {
        for engine in [Engine::Pread, Engine::Auto] {
            let plan = RankPlan::new(checkpoint, layout, coordinate).unwrap();
            let needed = plan.bytes_needed();
            let source = CheckpointSource::new(checkpoint, plan);
            let load = load(wanted(&image, coordinate), engine);
            source.probe(&load).unwrap();
            source.deliver(&load).unwrap();
            assert!(load.filling().unwrap().is_complete());
            assert_eq!(source.requested().needed(), needed, "{coordinate}: every byte once");
        }
    }
    std::fs::remove_dir_all(image.dir()).unwrap();
}

#[test]
fn a_rank_loaded_straight_from_the_checkpoint_is_the_packed_image_bit_for_bit() {
    let sizes = Sizes::default();
    let fp8 = Sizes { block: Some(16), ..sizes };
    for (model, layouts) in [
        (qwen3_moe(&sizes), vec![layout(1, 1, 1, 1), layout(4, 1, 2, 1), layout(2, 1, 1, 2)]),
        (llama(&fp8), vec![layout(2, 1, 1, 1)]),
        (mixtral(&sizes), vec![layout(2, 1, 2, 1)]),
        (gpt_oss(&sizes), vec![layout(2, 1, 1, 1), layout(2, 1, 2, 1)]),
    ] {
        let dir = TempDir::new().unwrap();
        let at = dir.path().join("m");
        model.write(&at, 3);
        let checkpoint = support::open(&at).unwrap();
        for layout in layouts {
            straight(&checkpoint, &LayoutOptions { experimental: true, ..layout }, dir.path());
        }
    }
    let dir = TempDir::new().unwrap();
    let at = dir.path().join("m");
    std::fs::create_dir(&at).unwrap();
    let checkpoint = deepseek(&at);
    straight(
        &checkpoint,
        &LayoutOptions { draft: true, experimental: true, ..layout(4, 1, 2, 1) },
        dir.path(),
    );
}

#[test]
fn an_image_that_breaks_in_the_middle_is_finished_from_the_checkpoint() {
    let dir = TempDir::new().unwrap();
    let at = dir.path().join("m");
    // Several blocks.
    let mut model = llama(&Sizes::default());
    model.add("model.layers.0.self_attn.rotary_emb.inv_freq", Dtype::F32, &[12 << 20]);
    model.write(&at, 2);
    let checkpoint = support::open(&at).unwrap();
    let layout = LayoutOptions { allow_unclaimed: true, experimental: true, ..layout(1, 1, 1, 1) };
    let image = dir.path().join("image");
    pack_ranks(&checkpoint, &image, &layout, &PackOptions::default(), &()).unwrap();
    let image = Image::open(&image).unwrap();
    let rank = &image.ranks()[0];
    let file = std::fs::File::options().write(true).open(&rank.path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"other", 17 << 20).unwrap();
    let plan = RankPlan::new(&checkpoint, &layout, rank.coordinate).unwrap();
    let sources: [Box<dyn Source>; 2] = [
        Box::new(ImageSource::new(&rank.path, rank.table.digests().clone())),
        Box::new(CheckpointSource::new(&checkpoint, plan)),
    ];
    let load = load(wanted(&image, rank.coordinate), Engine::Auto);
    let (_, report) = load.run(&sources).unwrap();
    assert_eq!((report.source, report.failovers(), report.verified), (Some(SourceKind::Checkpoint), 1, true));
    assert!(report.used[0].bytes >= 16 << 20, "{:?}", report.used);
}

#[test]
fn a_shard_that_changed_since_its_header_was_read_is_refused() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let plan = RankPlan::new(&checkpoint, &layout(1, 1, 1, 1), Coordinate::WHOLE).unwrap();
    let payload = plan.payload;
    let source = CheckpointSource::new(&checkpoint, plan);
    let wanted = Wanted { image: None, rank: "r".into(), payload, digests: Proof::default() };
    let load = load(wanted.clone(), Engine::Auto);
    let (_, report) = load.run(&[Box::new(source)]).unwrap();
    assert!(!report.verified, "a checkpoint proves nothing");
    let path = &checkpoint.shards()[1].path;
    std::fs::File::options().write(true).open(path).unwrap().set_len(5000).unwrap();
    let plan = RankPlan::new(&checkpoint, &layout(1, 1, 1, 1), Coordinate::WHOLE).unwrap();
    let load = self::load(wanted, Engine::Auto);
    let e = load.run(&[Box::new(CheckpointSource::new(&checkpoint, plan))]).unwrap_err();
    assert!(e.kind() == Kind::Corrupt && e.detail().contains("when its header was read"), "{e}");
}

fn stream(plan: ReadPlan, pool: &SlabPool, observe: bool) -> TensorStream {
    let io = Io::new(&IoConfig::default()).unwrap();
    let config =
        StreamConfig { io, threads: 2, pool: pool.clone(), patience: Duration::from_secs(20), observe };
    TensorStream::start(plan, &config).unwrap()
}

fn pool(budget: u64) -> (SlabPool, Budget) {
    let budget = Budget::new(ByteSize(budget));
    (SlabPool::new(budget.clone(), None), budget)
}

/// The bytes of a tensor's slice, by hand.
fn by_hand(whole: &[u8], shape: &[u64], dtype: Dtype, dim: usize, runs: &[(u64, u64)]) -> Vec<u8> {
    let below: u64 = shape[dim + 1..].iter().product::<u64>() * dtype.bits() / 8;
    let above: u64 = shape[..dim].iter().product();
    let mut bytes = Vec::new();
    for row in 0..above {
        for (from, to) in runs {
            let at = |i: u64| ((row * shape[dim] + i) * below) as usize;
            bytes.extend(&whole[at(*from)..at(*to)]);
        }
    }
    bytes
}

fn stock(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let tensor = checkpoint.tensors().at(checkpoint.tensors().find(name).unwrap()).unwrap();
    let shard = &checkpoint.shards()[tensor.shard];
    let all = std::fs::read(&shard.path).unwrap();
    let at = (shard.data_start() + tensor.begin) as usize;
    all[at..at + tensor.bytes as usize].to_vec()
}

fn check(checkpoint: &Checkpoint, tensor: &PartialTensor) {
    let whole = stock(checkpoint, tensor.name());
    let held = tensor.view().as_slice();
    match tensor.slice() {
        None => assert!(held == whole, "{}", tensor.name()),
        Some(slice) if !slice.runs.is_empty() => {
            let wanted = by_hand(&whole, tensor.shape(), tensor.dtype(), slice.dim, &slice.runs);
            assert!(held == wanted, "{} {slice:?}", tensor.name());
        }
        Some(_) => {}
    }
}

#[test]
fn every_rank_is_given_its_tensors_in_order_whatever_the_slabs_and_all_memory_comes_back() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let layout = LayoutOptions { draft: true, experimental: true, ..layout(4, 1, 2, 1) };
    for coordinate in coordinates(&checkpoint, &layout) {
        let plan = RankPlan::new(&checkpoint, &layout, coordinate).unwrap();
        for slab in [0, 4096, 16 << 10, 256 << 20] {
            let plan = ReadPlan::new(&checkpoint, &plan, SlabConfig { slab: ByteSize(slab) });
            let names: Vec<String> = plan.names().map(str::to_owned).collect();
            let (pool, budget) = pool(32 << 10);
            let mut given = Vec::new();
            for tensor in stream(plan, &pool, false) {
                let Tensor::Read(tensor) = tensor.unwrap() else { panic!("stock") };
                check(&checkpoint, &tensor);
                given.push(tensor.name().to_owned());
            }
            assert_eq!(given, names, "{coordinate} {slab}");
            assert!(budget.peak() <= (32 << 10) || slab > 32 << 10, "{} in flight", budget.peak());
            pool.release().proved().unwrap();
            assert_eq!((pool.bytes(), budget.used()), (0, 0));
        }
    }
}

#[test]
fn slabs_are_those_that_the_plan_of_costs_counts() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let layout = LayoutOptions { draft: true, experimental: true, ..layout(4, 1, 2, 1) };
    for slab in [4096, 16 << 10] {
        let costs = CostOptions { slab: ByteSize(slab), ..CostOptions::default() };
        for rank in plan(&checkpoint, &layout, &costs).unwrap().ranks {
            let draft = Coordinate { model: ModelPart::Draft, ..rank.coordinate };
            for (coordinate, cost) in [(rank.coordinate, &rank.target), (draft, rank.draft.as_ref().unwrap())]
            {
                let plan = RankPlan::new(&checkpoint, &layout, coordinate).unwrap();
                let plan = ReadPlan::new(&checkpoint, &plan, SlabConfig { slab: ByteSize(slab) });
                let seen = plan.observe();
                let counted = (cost.tensors, cost.bytes_kept, cost.slabs);
                assert_eq!((seen.tensors, seen.bytes_kept, seen.slabs), counted, "{coordinate}");
                let (pool, _) = pool(1 << 30);
                let mut stream = stream(plan, &pool, false);
                assert!(stream.by_ref().all(|tensor| tensor.is_ok()));
                assert_eq!(stream.requested().requested(), cost.bytes_read, "{coordinate}: bytes asked for");
                assert_eq!(pool.stats().slabs, cost.slabs);
            }
        }
    }
}

#[test]
fn a_draft_opens_its_own_shards_and_no_other() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let layout = LayoutOptions { draft: true, experimental: true, ..layout(2, 1, 1, 1) };
    let draft = Coordinate { model: ModelPart::Draft, ..Coordinate::WHOLE };
    let plan = ReadPlan::new(
        &checkpoint,
        &RankPlan::new(&checkpoint, &layout, draft).unwrap(),
        SlabConfig::default(),
    );
    let seen = plan.observe();
    assert_eq!((seen.shards, seen.shards_skipped), (1, 2));
    // The others could not even be opened.
    for shard in &checkpoint.shards()[..2] {
        std::fs::remove_file(&shard.path).unwrap();
    }
    let (pool, _) = pool(1 << 30);
    let names: Vec<_> = stream(plan, &pool, false)
        .map(|t| match t.unwrap() {
            Tensor::Read(t) => t.name().to_owned(),
            Tensor::Stock(t) => panic!("{} is stock", t.name),
        })
        .collect();
    assert!(names.len() as u64 == seen.tensors && names.iter().all(|name| name.starts_with("mtp.")));
}

#[test]
fn a_part_answers_its_full_shape_and_refuses_by_name_whatever_lies_outside() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let coordinate = Coordinate { tp: 1, ..Coordinate::WHOLE };
    let layout = LayoutOptions { experimental: true, ..layout(4, 1, 1, 1) };
    let plan = RankPlan::new(&checkpoint, &layout, coordinate).unwrap();
    let (pool, _) = pool(1 << 30);
    let all = stream(ReadPlan::new(&checkpoint, &plan, SlabConfig::default()), &pool, false);
    let all: Vec<_> = all
        .map(|t| match t.unwrap() {
            Tensor::Read(t) => t,
            Tensor::Stock(t) => panic!("{} is stock", t.name),
        })
        .collect();
    let find = |name: &str| all.iter().find(|t| t.name() == name).unwrap();
    // Rows 8..16 of 32, columns 8..16 of 32.
    let (w1, w2) = (find("layers.1.ffn.experts.2.w1.weight"), find("layers.1.ffn.experts.2.w2.weight"));
    for (tensor, dim, shape) in [(w1, 0, [32, 64]), (w2, 1, [64, 32])] {
        assert_eq!((tensor.shape(), tensor.slice().unwrap().runs.as_slice()), (&shape[..], &[(8, 16)][..]));
        let granted = tensor.ask(Access::Narrow { dim, start: 8, len: 8 }).unwrap();
        let whole = stock(&checkpoint, tensor.name());
        assert_eq!(granted.bytes, by_hand(&whole, tensor.shape(), tensor.dtype(), dim, &[(8, 16)]));
        assert_eq!(granted.shape[dim], 8);
        let same = tensor.ask(Access::Slice { dim, start: 8, end: 16, step: 1 }).unwrap();
        assert_eq!(same.bytes, granted.bytes);
        let outside = [
            Access::Narrow { dim, start: 7, len: 8 },
            Access::Narrow { dim, start: 9, len: 8 },
            Access::Narrow { dim, start: 0, len: 32 },
            Access::Narrow { dim: 1 - dim, start: 8, len: 8 },
            Access::Narrow { dim: 1 - dim, start: 0, len: 64 },
            Access::Slice { dim, start: 8, end: 16, step: 2 },
            Access::Slice { dim, start: 0, end: 8, step: 1 },
            Access::Select { dim: 1, index: 3 },
            Access::Select { dim: 0, index: 3 },
        ];
        for access in outside.into_iter().chain(Access::WHOLE) {
            let e = tensor.ask(access).unwrap_err();
            assert_eq!(e.kind(), Kind::Mismatch, "{access}: {e}");
            for part in [tensor.name(), &access.to_string(), &format!("8..16 of dimension {dim}")] {
                assert!(e.detail().contains(part), "{access}: {e}");
            }
        }
        for bad in
            [Access::Narrow { dim: 2, start: 0, len: 1 }, Access::Narrow { dim, start: 30, len: u64::MAX }]
        {
            assert_eq!(tensor.ask(bad).unwrap_err().kind(), Kind::Invalid);
        }
    }
    // Rows of what is there are contiguous, so any of them may be had; one of them alone, too.
    assert_eq!(w1.ask(Access::Narrow { dim: 0, start: 9, len: 2 }).unwrap().bytes.len(), 128);
    assert_eq!(w1.ask(Access::Select { dim: 0, index: 15 }).unwrap().shape, [64]);
    // A whole tensor grants everything but being written.
    let norm = find("norm.weight");
    let whole = stock(&checkpoint, "norm.weight");
    for access in Access::WHOLE {
        match norm.ask(access) {
            Ok(granted) => assert_eq!(granted.bytes, whole),
            Err(e) => assert!(access == Access::CopyInto && e.detail().contains("norm.weight"), "{e}"),
        }
    }
    assert_eq!(norm.ask(Access::Narrow { dim: 0, start: 3, len: 2 }).unwrap().bytes, &whole[12..20]);
    let embed = find("embed.weight");
    assert_eq!(embed.ask(Access::Narrow { dim: 1, start: 0, len: 2 }).unwrap_err().kind(), Kind::Mismatch);
}

#[test]
fn a_part_that_escapes_is_named_and_a_consumer_that_keeps_everything_is_told_who_has_it() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let plan = RankPlan::new(&checkpoint, &layout(1, 1, 1, 1), Coordinate::WHOLE).unwrap();
    let plan = ReadPlan::new(&checkpoint, &plan, SlabConfig { slab: ByteSize(16 << 10) });
    let (wide, _) = pool(1 << 30);
    let mut kept = None;
    for tensor in stream(plan.clone(), &wide, false) {
        let Tensor::Read(tensor) = tensor.unwrap() else { continue };
        if tensor.name() == "layers.0.attn.wq.weight" {
            kept = Some(tensor);
        }
    }
    let e = wide.release().proved().unwrap_err();
    assert!(e.detail().contains("layers.0.attn.wq.weight") && !e.detail().contains("experts"), "{e}");
    drop(kept);
    assert_eq!(wide.bytes(), 0);
    let (tight, _) = pool(40 << 10);
    let io = Io::new(&IoConfig::default()).unwrap();
    let patience = Duration::from_millis(100);
    let config = StreamConfig { io, threads: 1, pool: tight.clone(), patience, observe: false };
    let mut all = Vec::new();
    let mut stuck = None;
    for tensor in TensorStream::start(plan, &config).unwrap() {
        match tensor {
            Ok(tensor) => all.push(tensor),
            Err(e) => stuck = Some(e),
        }
    }
    let e = stuck.expect("the budget is smaller than the model");
    assert!(e.kind() == Kind::Deadline && e.detail().contains("held by"), "{e}");
    drop(all);
    assert_eq!(tight.held(), []);
}

#[test]
fn a_stream_that_is_dropped_in_the_middle_ends_soon_and_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let plan = RankPlan::new(&checkpoint, &layout(1, 1, 1, 1), Coordinate::WHOLE).unwrap();
    let plan = ReadPlan::new(&checkpoint, &plan, SlabConfig { slab: ByteSize(4096) });
    let (pool, budget) = pool(8192);
    let mut stream = stream(plan, &pool, false);
    let first = stream.next().unwrap().unwrap();
    let began = std::time::Instant::now();
    // The reader waits for memory that `first` may have, with patience for 20 seconds.
    drop(stream);
    assert!(began.elapsed() < Duration::from_secs(15));
    drop(first);
    assert_eq!((budget.used(), pool.held().len()), (0, 0));
}

#[test]
fn of_an_unknown_layout_everything_but_experts_is_read_and_experts_are_stock() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let plan = ReadPlan::unknown(&checkpoint, SlabConfig::default());
    assert!(plan.stock().iter().all(|t| t.name.contains(".experts.")) && plan.stock().len() == 72);
    let (pool, _) = pool(1 << 30);
    let io = Io::new(&IoConfig::default()).unwrap();
    let (mut read, mut stocked) = (0, 0);
    for tensor in stream(plan, &pool, false) {
        match tensor.unwrap() {
            Tensor::Read(tensor) => {
                assert!(tensor.slice().is_none() && !tensor.name().contains(".experts."));
                check(&checkpoint, &tensor);
                read += 1;
            }
            Tensor::Stock(tensor) => {
                let mut bytes = vec![0; tensor.bytes as usize];
                tensor.read(&io, &mut bytes).unwrap();
                assert!(bytes == stock(&checkpoint, &tensor.name));
                stocked += 1;
            }
        }
    }
    assert_eq!(read + stocked, checkpoint.tensors().len());
}

#[test]
fn observing_reads_nothing_and_leaves_every_tensor_stock() {
    let dir = TempDir::new().unwrap();
    let checkpoint = deepseek(dir.path());
    let layout = LayoutOptions { experimental: true, ..layout(4, 1, 1, 1) };
    let plan = RankPlan::new(&checkpoint, &layout, Coordinate::WHOLE).unwrap();
    let plan = ReadPlan::new(&checkpoint, &plan, SlabConfig::default());
    let seen = plan.observe();
    assert!(seen.partial == 2 * 4 * 6 && seen.tensors > seen.partial, "{seen:?}");
    let (pool, budget) = pool(1 << 30);
    let mut count = 0;
    for tensor in stream(plan, &pool, true) {
        let Tensor::Stock(tensor) = tensor.unwrap() else { panic!("read") };
        let original = checkpoint.tensors().at(checkpoint.tensors().find(&tensor.name).unwrap()).unwrap();
        assert_eq!((tensor.shape.as_slice(), tensor.bytes), (original.shape, original.bytes));
        let io = Io::new(&IoConfig::default()).unwrap();
        let mut bytes = vec![0; tensor.bytes as usize];
        tensor.read(&io, &mut bytes).unwrap();
        assert!(bytes == stock(&checkpoint, &tensor.name));
        count += 1;
    }
    assert_eq!((count, budget.peak(), pool.stats().allocations), (seen.tensors, 0, 0));
}
