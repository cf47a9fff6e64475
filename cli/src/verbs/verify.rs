//! `flashboot verify IMAGE`.

use super::pack::{Timed, paced, short};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    progress::Bar,
};
use clap::Args;
use flashboot_checkpoint::{Image, VerifyOptions, VerifyReport};
use std::{
    fmt::Write as _,
    path::PathBuf,
    time::{Duration, Instant},
};

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The image's directory
    image: PathBuf,
}

pub(crate) fn run(args: &VerifyArgs, output: Output) -> Result<Code, Failure> {
    let began = Instant::now();
    let image = Image::open(&args.image)?;
    let bar = Bar::new(output, "verifying");
    let report = flashboot_checkpoint::verify(&image, &VerifyOptions::default(), &bar)?;
    drop(bar);
    let took = began.elapsed();
    output.result(&Timed { report: &report, ms: took.as_secs_f64() * 1e3 }, || text(&report, took))?;
    Ok(Code::from(if report.ok { 0 } else { 3 }))
}

pub(super) fn text(report: &VerifyReport, took: Duration) -> String {
    let (bytes, paced) = (human::bytes(report.bytes), paced(report.bytes, took));
    if report.ok {
        return format!(
            "verified  {bytes}, every block is what it was, {paced}\n          id {}\n",
            short(&report.id)
        );
    }
    let mut text = format!(
        "DAMAGED   {} {} not match, of {bytes} in all: pack or fetch the image again\n",
        human::count(report.bad_blocks.len() as u64, "block"),
        if report.bad_blocks.len() == 1 { "does" } else { "do" },
    );
    for rank in report.ranks.iter().filter(|rank| !rank.bad_blocks.is_empty()) {
        for block in &rank.bad_blocks {
            let start = block.saturating_mul(flashboot_core::BLOCK);
            let end = start.saturating_add(flashboot_core::BLOCK).min(rank.bytes);
            // Writing to a String cannot fail.
            let _ = writeln!(text, "          {}: block {block} (bytes {start}..{end})", rank.file);
        }
    }
    text
}
