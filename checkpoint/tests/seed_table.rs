//! The published table of a fast loader for one model on four ranks: what each rank reads, keeps and pins. The model
//! is made of headers alone, in sparse files of the right length, from what is known of it: 384 experts in 40 layers,
//! 1,520 other tensors of 10.81 GB, 203 GB of tables that no GPU loads, a draft of 3 stages of 128 experts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

use flashboot_checkpoint::{
    Checkpoint, Cost, CostOptions, LayoutOptions, OpenOptions, Parallel, PlanReport, RankCost, Slicing, plan,
};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

/// One shard's header, tensor by tensor.
#[derive(Default)]
struct Header {
    text: String,
    at: u64,
}

impl Header {
    fn add(&mut self, name: &str, dtype: &str, shape: &[u64], width: u64) {
        let end = self.at + shape.iter().product::<u64>() * width;
        let comma = if self.text.is_empty() { "{" } else { "," };
        let at = self.at;
        write!(
            self.text,
            "{comma}\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
        )
        .unwrap();
        self.at = end;
    }

    fn bytes(&mut self, name: &str, bytes: u64) {
        self.add(name, "BF16", &[bytes / 2], 2);
    }

    fn expert(&mut self, prefix: &str) {
        for (w, rows, columns) in [("w1", 2304, 2560), ("w2", 5120, 1152), ("w3", 2304, 2560)] {
            self.add(&format!("{prefix}.{w}.weight"), "I8", &[rows, columns], 1);
            self.add(&format!("{prefix}.{w}.scale"), "F8_E8M0", &[rows, columns / 16], 1);
        }
    }

    fn write(self, dir: &Path, number: usize) {
        let name = format!("model-{number:05}-of-00048.safetensors");
        let header = self.text + "}";
        let mut file = std::fs::File::create(dir.join(name)).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + self.at).unwrap();
    }
}

/// Sizes like those of a layer's other tensors: a few projections and many small ones, `total` together.
fn others(count: u64, total: u64) -> Vec<u64> {
    let mut sizes = vec![20_480; count as usize];
    let left = total - 20_480 * count;
    let weights = [34, 20, 12, 9, 8, 6, 5, 3, 2, 1];
    for (size, weight) in sizes.iter_mut().zip(weights) {
        *size += left * weight / 100 / 2 * 2;
    }
    sizes
}

fn write_model(dir: &Path) {
    let config =
        r#"{"model_type":"deepseek_v4","text_config":{"n_routed_experts":384,"num_hidden_layers":40}}"#;
    std::fs::write(dir.join("config.json"), config).unwrap();
    for layer in 0..40 {
        let mut header = Header::default();
        for (i, bytes) in others(37, 190_000_000).into_iter().enumerate() {
            header.bytes(&format!("layers.{layer}.attn.t{i}.weight"), bytes);
        }
        for expert in 0..384 {
            header.expert(&format!("layers.{layer}.ffn.experts.{expert}"));
        }
        header.write(dir, layer + 1);
    }
    for shard in 0..5 {
        let mut header = Header::default();
        // 39 of 1.886 GB together; beside the largest tensor only small ones.
        let (count, bytes) = if shard == 4 { (7, 1_000_000) } else { (8, 58_718_750) };
        (0..count).for_each(|i| header.bytes(&format!("hc.{shard}.t{i}.weight"), bytes));
        if shard == 4 {
            header.bytes("embed.weight", 1_324_000_000);
        }
        header.bytes(&format!("engram.{shard}.weight"), 203_000_000_000 / 5);
        header.write(dir, 41 + shard);
    }
    for (stage, count, bytes) in [(0, 32, 80_000_000), (1, 32, 300_000_000), (2, 33, 300_000_000)] {
        let mut header = Header::default();
        for (i, bytes) in others(count, bytes).into_iter().enumerate() {
            header.bytes(&format!("mtp.{stage}.attn.t{i}.weight"), bytes);
        }
        (0..128).for_each(|expert| header.expert(&format!("mtp.{stage}.ffn.experts.{expert}")));
        header.write(dir, 46 + stage);
    }
}

fn checkpoint() -> &'static Checkpoint {
    static MODEL: OnceLock<(TempDir, Checkpoint)> = OnceLock::new();
    let (_, checkpoint) = MODEL.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        write_model(dir.path());
        let checkpoint = Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap();
        (dir, checkpoint)
    });
    checkpoint
}

fn planned(ep: u32, slicing: Slicing) -> PlanReport {
    let parallel = Parallel { tp: 4, ep, ..Parallel::default() };
    let layout = LayoutOptions { parallel, slicing: Some(slicing), draft: true, ..LayoutOptions::default() };
    plan(checkpoint(), &layout, &CostOptions::default()).unwrap()
}

/// Every rank costs the same; one of them.
fn any_rank(report: &PlanReport) -> &RankCost {
    let first = &report.ranks[0];
    assert_eq!(report.ranks.len(), 4);
    // Where in its pages a part begins differs from rank to rank.
    let same = |cost: &Cost| Cost { bytes_device: 0, ..cost.clone() };
    for rank in &report.ranks {
        assert_eq!(same(&rank.target), same(&first.target));
        assert_eq!(rank.draft.as_ref().map(same), first.draft.as_ref().map(same));
    }
    first
}

/// Gigabytes as the table rounds them.
fn gb(bytes: u64, places: i32) -> f64 {
    let scale = 10f64.powi(places);
    (bytes as f64 / 1e9 * scale).round() / scale
}

fn close(found: u64, published: f64, what: &str) {
    let off = (found as f64 / published - 1.0).abs();
    assert!(off <= 0.05, "{what}: {found} is {:.1} % off the published {published}", off * 100.0);
}

#[test]
fn bytes_read_and_kept_are_the_tables() {
    for (ep, slicing, read, kept, shard, window, draft_read, draft_kept) in [
        (2, Slicing::Off, 155.2, 155.2, 3.80, 7.6, 7.9, 7.9),
        (1, Slicing::Off, 299.6, 299.6, 7.41, 14.8, 7.9, 7.9),
        (1, Slicing::Experts, 155.2, 83.0, 1.99, 4.0, 4.3, 2.5),
        (2, Slicing::Experts, 107.1, 83.0, 1.99, 4.0, 5.5, 4.3),
    ] {
        let report = planned(ep, slicing);
        let rank = any_rank(&report);
        let RankCost { target, draft: Some(draft), .. } = rank else { panic!("a draft was asked for") };
        assert_eq!((gb(target.bytes_read, 1), gb(target.bytes_kept, 1)), (read, kept), "ep {ep} {slicing:?}");
        assert_eq!((gb(target.largest_shard_kept, 2), gb(target.window_bytes, 1)), (shard, window));
        assert_eq!((gb(draft.bytes_read, 1), gb(draft.bytes_kept, 1)), (draft_read, draft_kept));
        assert_eq!(gb(target.bytes_needed, 1), 83.0, "whatever is read, this is what the model needs");
        assert!(
            target.bytes_device >= target.bytes_read
                && gb(target.bytes_device, 0) <= gb(target.bytes_read, 0) + 1.0
        );
    }
}

#[test]
fn tensors_are_counted_as_in_the_table() {
    let counts = |ep, slicing| {
        let report = planned(ep, slicing);
        let rank = any_rank(&report);
        let draft: &Cost = rank.draft.as_ref().unwrap();
        (rank.target.tensors, rank.target.pinned_requests, draft.tensors)
    };
    assert_eq!(counts(1, Slicing::Experts), (93_680, 93_680, 2_401));
    assert_eq!(counts(2, Slicing::Off), (47_600, 47_600, 2_401));
}

#[test]
fn slabs_and_the_host_allocator_are_the_tables() {
    const GIB: f64 = (1u64 << 30) as f64;
    for (ep, slicing, slabs, before, after, peaks, draft_slabs, draft_peaks) in [
        (1, Slicing::Experts, 330, 7_224.0, 27.0, [7.9, 5.8], 11, [3.3, 2.5]),
        (2, Slicing::Off, 610, 3_738.0, 48.0, [15.0, 10.9], 32, [10.5, 7.8]),
    ] {
        let report = planned(ep, slicing);
        let RankCost { target, draft: Some(draft), .. } = any_rank(&report) else { panic!("a draft") };
        println!("{target:?}\n{draft:?}");
        assert_eq!((target.slabs, draft.slabs), (slabs, draft_slabs), "ep {ep}");
        close(target.host_allocs_without_slabs, before, "allocations without slabs");
        close(target.host_allocs_with_slabs, after, "allocations with slabs");
        close(target.peak_pinned_without_slabs, peaks[0] * GIB, "peak without slabs");
        close(target.peak_pinned, peaks[1] * GIB, "peak with slabs");
        assert_eq!((draft.host_allocs_without_slabs, draft.host_allocs_with_slabs), (2_401, draft_slabs));
        close(draft.peak_pinned_without_slabs, draft_peaks[0] * GIB, "the draft's peak without slabs");
        close(draft.peak_pinned, draft_peaks[1] * GIB, "the draft's peak with slabs");
    }
}

#[test]
fn everything_that_can_be_cut_is_by_default_and_a_draft_is_not_planned_unasked() {
    let parallel = Parallel { tp: 4, ..Parallel::default() };
    let layout = LayoutOptions { parallel, ..LayoutOptions::default() };
    let report = plan(checkpoint(), &layout, &CostOptions::default()).unwrap();
    assert_eq!(report.slicing, Slicing::All);
    assert!(any_rank(&report).draft.is_none());
    assert_eq!(gb(any_rank(&report).target.bytes_kept, 1), 83.0);
}
