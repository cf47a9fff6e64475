//! `flashboot pack CHECKPOINT -o IMAGE`: for one rank, or for all of a layout.

use super::layout::LayoutArgs;
use super::{Reading, open_options};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    progress::Bar,
};
use clap::Args;
use flashboot::config::Config;
use flashboot_checkpoint::{Checkpoint, LayoutOptions, PackOptions, PackReport, PackedRanks};
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// A directory of safetensors files, an index or one safetensors file
    checkpoint: PathBuf,
    /// The image's directory; it appears whole or not at all
    #[arg(short, long, value_name = "IMAGE")]
    output: PathBuf,
    /// Replace an image that is there
    #[arg(long)]
    replace: bool,
    /// Go on from what a killed pack of the same has written
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    pub(super) reading: Reading,
}

pub(crate) fn run(args: &PackArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let began = Instant::now();
    let layout = args.layout.options()?;
    let checkpoint = Checkpoint::open(&args.checkpoint, &open_options(config))?;
    let options = PackOptions { replace: args.replace, resume: args.resume, ..PackOptions::default() };
    let bar = Bar::new(output, "packing");
    if layout != LayoutOptions::default() || args.resume {
        let packed = flashboot_checkpoint::pack_ranks(&checkpoint, &args.output, &layout, &options, &bar)?;
        drop(bar);
        let took = began.elapsed();
        let timed = Timed { report: &packed, ms: took.as_secs_f64() * 1e3 };
        output.result(&timed, || ranks_line("packed", &packed, took))?;
        return Ok(Code::SUCCESS);
    }
    let report = flashboot_checkpoint::pack(&checkpoint, &args.output, &options, &bar)?;
    drop(bar);
    let took = began.elapsed();
    let timed = Timed { report: &report, ms: took.as_secs_f64() * 1e3 };
    output.result(&timed, || line(&report, took))?;
    Ok(Code::SUCCESS)
}

/// A report and how long it took.
#[derive(serde::Serialize)]
pub(super) struct Timed<'r, R: serde::Serialize> {
    #[serde(flatten)]
    pub(super) report: &'r R,
    pub(super) ms: f64,
}

pub(super) fn line(report: &PackReport, took: Duration) -> String {
    let notes: String =
        report.notes.iter().map(|note| format!("note      {}\n", human::plain(note, false))).collect();
    format!(
        "packed    {} in {}, {}\n          {} (id {})\n{notes}",
        human::count(report.tensors, "tensor"),
        human::bytes(report.bytes),
        paced(report.bytes, took),
        report.image.display(),
        short(&report.id),
    )
}

pub(super) fn ranks_line(what: &str, packed: &PackedRanks, took: Duration) -> String {
    let PackedRanks { report, files, resumed } = packed;
    let notes: String =
        report.notes.iter().map(|note| format!("note      {}\n", human::plain(note, false))).collect();
    let kept =
        if *resumed > 0 { format!(", {} of it before", human::bytes(*resumed)) } else { String::new() };
    format!(
        "{what:9} {} in {}, {}{kept}, {}\n          {} (id {})\n{notes}",
        human::count(report.ranks, "rank"),
        human::count(*files, "payload"),
        human::bytes(report.bytes),
        paced(report.bytes, took),
        human::plain(&report.image.display().to_string(), false),
        short(&report.id),
    )
}

/// `12.3 ms (7.1 GB/s)`.
pub(super) fn paced(bytes: u64, took: Duration) -> String {
    let rate = bytes as f64 / took.as_secs_f64().max(1e-9);
    format!("{} ({})", human::ms(took.as_secs_f64() * 1e3), human::rate(rate))
}

/// The first digits of an id: enough for people.
pub(super) fn short(id: &str) -> &str {
    id.get(..16).unwrap_or(id)
}
