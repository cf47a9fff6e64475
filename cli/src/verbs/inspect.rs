//! `flashboot inspect PATH`.

use super::{Reading, open_options};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    table::{Side, Table},
};
use clap::Args;
use flashboot::config::Config;
use flashboot_checkpoint::{InspectedKind, Inspection};
use std::{fmt::Write as _, path::PathBuf};

/// Files that are listed for people.
const LISTED: usize = 20;

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A checkpoint (directory, index or safetensors file) or an image
    path: PathBuf,
    #[command(flatten)]
    pub(super) reading: Reading,
}

pub(crate) fn run(args: &InspectArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let inspection = flashboot_checkpoint::inspect(&args.path, &open_options(config))?;
    output.result(&inspection, || text(&inspection))?;
    Ok(Code::SUCCESS)
}

pub(super) fn kind(inspection: &Inspection) -> &'static str {
    match inspection.kind {
        InspectedKind::Checkpoint => "checkpoint",
        InspectedKind::Image => "image",
    }
}

pub(super) fn dtypes(inspection: &Inspection) -> String {
    let each = inspection.dtypes.iter().map(|(dtype, bytes)| format!("{dtype} {}", human::bytes(*bytes)));
    each.collect::<Vec<_>>().join(", ")
}

fn text(inspection: &Inspection) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:9} {}", human::plain(value, false));
    };
    line("path", &inspection.path.display().to_string());
    line("kind", kind(inspection));
    if let Some(id) = &inspection.id {
        line("id", id);
    }
    let model_type = inspection.fingerprint.as_ref().and_then(|f| f.model_type.as_ref());
    if let Some(model_type) = inspection.model_type.as_ref().or(model_type) {
        line("model", model_type);
    }
    line("tensors", &format!("{} ({} of experts)", inspection.tensors, inspection.expert_tensors));
    line("bytes", &format!("{} ({})", inspection.bytes, human::bytes(inspection.bytes)));
    if inspection.kind == InspectedKind::Image {
        line("ranks", &inspection.ranks.to_string());
    }
    line("dtypes", &dtypes(inspection));
    for (alias, of) in &inspection.aliases {
        line("alias", &format!("{alias} → {of}"));
    }
    for note in &inspection.notes {
        line("note", note);
    }
    let mut files = Table::new(&[("file", Side::Left), ("tensors", Side::Right), ("bytes", Side::Right)]);
    for file in inspection.files.iter().take(LISTED) {
        files.row(vec![human::plain(&file.file, false), file.tensors.to_string(), human::bytes(file.bytes)]);
    }
    text.push('\n');
    text += &files.render();
    let more = inspection.files.len().saturating_sub(LISTED);
    if more > 0 {
        let _ = writeln!(text, "… and {more} more");
    }
    text
}
