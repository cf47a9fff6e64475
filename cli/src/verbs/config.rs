//! `flashboot config show [--origin]`.

use crate::{
    exit::{Code, Failure},
    output::Output,
    settings::Settings,
    table::{Side, Table},
};
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Print every key with its value
    Show {
        /// Say where each value came from: default, file, environment variable or flag
        #[arg(long)]
        origin: bool,
    },
}

pub(crate) fn run(args: &ConfigArgs, settings: &Settings, output: Output) -> Result<Code, Failure> {
    let What::Show { origin } = args.what;
    if origin {
        let all = settings.all();
        let object: Map<_, _> =
            all.iter().map(|s| (s.key.clone(), json!({ "value": s.value, "origin": s.origin }))).collect();
        output.result(&object, || {
            let columns = [("key", Side::Left), ("value", Side::Left), ("origin", Side::Left)];
            let mut table = Table::new(&columns);
            for s in &all {
                table.row(vec![s.key.clone(), shown(&s.value), s.origin.clone()]);
            }
            table.render()
        })?;
    } else {
        output.result(&settings.config, || toml(settings))?;
    }
    Ok(Code::SUCCESS)
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "(not set)".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The configuration as a file that sets it.
fn toml(settings: &Settings) -> String {
    let (mut text, mut section) = (String::new(), String::new());
    let all = settings.all();
    // Keys without a section come first in TOML.
    let (bare, sectioned): (Vec<_>, Vec<_>) = all.iter().partition(|s| !s.key.contains('.'));
    for s in bare.into_iter().chain(sectioned) {
        let (above, name) = s.key.rsplit_once('.').unwrap_or(("", &s.key));
        if above != section {
            text += &format!("\n[{above}]\n");
            above.clone_into(&mut section);
        }
        match &s.value {
            Value::Null => text += &format!("# {name} is not set\n"),
            // JSON's texts, numbers, truths and lists of them are TOML's.
            value => text += &format!("{name} = {value}\n"),
        }
    }
    text
}
