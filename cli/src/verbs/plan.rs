//! `flashboot plan CHECKPOINT`: what loading it costs each rank, from its headers alone.

use super::layout::LayoutArgs;
use super::{Reading, open_options};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    table::{Side, Table},
};
use clap::Args;
use flashboot::config::Config;
use flashboot_checkpoint::{Checkpoint, Cost, CostOptions, PlanReport};
use flashboot_core::ByteSize;
use std::{fmt::Write as _, path::PathBuf};

/// Ranks that are listed for people.
const LISTED: usize = 64;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A directory of safetensors files, an index or one safetensors file
    checkpoint: PathBuf,
    #[command(flatten)]
    layout: LayoutArgs,
    /// Shards that a loader holds while it reads the next one
    #[arg(long, value_name = "K", default_value_t = 2)]
    window: u16,
    /// The size of a slab of pinned memory
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize::mib(256))]
    slab: ByteSize,
    #[command(flatten)]
    pub(super) reading: Reading,
}

pub(crate) fn run(args: &PlanArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    if args.window == 0 || args.slab.0 < 4096 {
        return Err(Failure::usage("--window must be at least 1 and --slab at least 4KiB"));
    }
    let layout = args.layout.options()?;
    let checkpoint = Checkpoint::open(&args.checkpoint, &open_options(config))?;
    let options = CostOptions { window: args.window.into(), slab: args.slab };
    let report = flashboot_checkpoint::plan(&checkpoint, &layout, &options)?;
    output.result(&report, || text(&report))?;
    Ok(Code::SUCCESS)
}

fn text(report: &PlanReport) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{} in {}, family {}, slicing {}",
        human::bytes(report.bytes),
        human::count(report.tensors, "tensor"),
        human::plain(&report.family, false),
        report.slicing.name(),
    );
    for note in &report.notes {
        let _ = writeln!(text, "note      {}", human::plain(note, false));
    }
    text.push('\n');
    let mut table = Table::new(&[
        ("rank", Side::Left),
        ("tensors", Side::Right),
        ("needed", Side::Right),
        ("read", Side::Right),
        ("from device", Side::Right),
        ("kept", Side::Right),
        ("largest shard", Side::Right),
        ("window", Side::Right),
        ("slabs", Side::Right),
        ("host allocs", Side::Right),
        ("peak pinned", Side::Right),
    ]);
    for rank in report.ranks.iter().take(LISTED) {
        table.row(row(rank.coordinate.to_string(), &rank.target));
        if let Some(draft) = &rank.draft {
            table.row(row("  its draft".into(), draft));
        }
    }
    text += &table.render();
    let more = report.ranks.len().saturating_sub(LISTED);
    if more > 0 {
        let _ = writeln!(text, "… and {more} more");
    }
    text
}

fn row(name: String, cost: &Cost) -> Vec<String> {
    vec![
        name,
        cost.tensors.to_string(),
        human::bytes(cost.bytes_needed),
        human::bytes(cost.bytes_read),
        human::bytes(cost.bytes_device),
        human::bytes(cost.bytes_kept),
        human::bytes(cost.largest_shard_kept),
        human::bytes(cost.window_bytes),
        cost.slabs.to_string(),
        format!("{} → {}", cost.host_allocs_without_slabs, cost.host_allocs_with_slabs),
        format!("{} → {}", human::bytes(cost.peak_pinned_without_slabs), human::bytes(cost.peak_pinned)),
    ]
}
