//! `flashboot unpack IMAGE -o CHECKPOINT`.

use super::pack::{Timed, paced};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    progress::Bar,
};
use clap::Args;
use flashboot_checkpoint::{Image, UnpackOptions, UnpackReport};
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

#[derive(Debug, Args)]
pub(crate) struct UnpackArgs {
    /// The image's directory
    image: PathBuf,
    /// The checkpoint's directory; it appears whole or not at all
    #[arg(short, long, value_name = "CHECKPOINT")]
    output: PathBuf,
    /// Replace a checkpoint that is there
    #[arg(long)]
    replace: bool,
}

pub(crate) fn run(args: &UnpackArgs, output: Output) -> Result<Code, Failure> {
    let began = Instant::now();
    let image = Image::open(&args.image)?;
    let options = UnpackOptions { replace: args.replace, ..UnpackOptions::default() };
    let bar = Bar::new(output, "unpacking");
    let report = flashboot_checkpoint::unpack(&image, &args.output, &options, &bar)?;
    drop(bar);
    let took = began.elapsed();
    output.result(&Timed { report: &report, ms: took.as_secs_f64() * 1e3 }, || line(&report, took))?;
    Ok(Code::SUCCESS)
}

pub(super) fn line(report: &UnpackReport, took: Duration) -> String {
    format!(
        "unpacked  {} in {}, {}\n          {}\n",
        human::count(report.tensors, "tensor"),
        human::count(report.files, "file"),
        paced(report.bytes, took),
        report.checkpoint.display(),
    )
}
