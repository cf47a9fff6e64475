//! `flashboot diff A B`: exit 0 when equal, 1 when not.

use super::{Reading, open_options};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
};
use clap::Args;
use flashboot::config::Config;
use flashboot_checkpoint::{DiffReport, DifferenceKind};
use std::{fmt::Write as _, path::PathBuf};

/// Differences that are listed for people.
const LISTED: usize = 50;

#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// A checkpoint or an image
    a: PathBuf,
    /// Another
    b: PathBuf,
    #[command(flatten)]
    pub(super) reading: Reading,
}

pub(crate) fn run(args: &DiffArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let report = flashboot_checkpoint::diff(&args.a, &args.b, &open_options(config))?;
    output.result(&report, || text(&report))?;
    Ok(Code::from(u8::from(!report.equal)))
}

fn text(report: &DiffReport) -> String {
    if report.equal {
        return format!("equal     {}\n", human::count(report.tensors_a, "tensor"));
    }
    let mut text = format!(
        "DIFFERENT {} ({} against {} tensors)\n",
        human::count(report.count, "difference"),
        report.tensors_a,
        report.tensors_b
    );
    for difference in report.differences.iter().take(LISTED) {
        let what = match &difference.what {
            DifferenceKind::OnlyInA => "only in the first".to_owned(),
            DifferenceKind::OnlyInB => "only in the second".to_owned(),
            DifferenceKind::Dtype { a, b } => format!("dtype {} against {}", a.name(), b.name()),
            DifferenceKind::Shape { a, b } => format!("shape {a:?} against {b:?}"),
            DifferenceKind::View => "a view of other bytes, or only one of them is a view".to_owned(),
            DifferenceKind::Bytes { first_at } => format!("bytes differ, first at {first_at}"),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "          {}: {what}", human::plain(&difference.tensor, false));
    }
    let more = report.count.saturating_sub(LISTED as u64);
    if more > 0 {
        let _ = writeln!(text, "          … and {more} more");
    }
    text
}
