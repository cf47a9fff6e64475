//! `flashboot doctor`.

use super::replicate::{run_directory, runtime};
use crate::{
    exit::Failure,
    human,
    output::Output,
    table::{Side, Table},
};
use clap::Args;
use flashboot::{
    config::Config,
    doctor::{self, Diagnosis, Request},
};
use std::{fmt::Write as _, process::ExitCode, time::Duration};

/// A driver sets each GPU up at its first use, and takes its time.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Look at this GPU only: cuda:N, its UUID (GPU-…) or its PCI address [default: every visible one]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// The longest all of it may take [default: 1m]
    #[arg(long, value_name = "DURATION")]
    timeout: Option<humantime::Duration>,
}

pub(crate) fn run(args: &DoctorArgs, config: &Config, output: Output) -> Result<ExitCode, Failure> {
    let request = Request {
        device: args.device.clone(),
        directory: run_directory(),
        network: config.network(),
        timeout: args.timeout.map_or(TIMEOUT, Into::into),
    };
    let runtime = runtime(false)?;
    let found = runtime.block_on(doctor::doctor(request));
    // A driver that hangs keeps its thread; the process ends without it.
    runtime.shutdown_background();
    let found = found?;
    output.result(&found, || text(&found))?;
    Ok(ExitCode::SUCCESS)
}

fn text(found: &Diagnosis) -> String {
    let mut text = String::new();
    let yes = |ok: bool| if ok { "yes" } else { "no" }.to_owned();
    // A UUID is long: a GPU of this process is shown by its number.
    let short = |memory: &str| {
        let gpu = found.devices.iter().find(|gpu| gpu.uuid == memory);
        gpu.map_or_else(|| memory.to_owned(), |gpu| format!("cuda:{}", gpu.number))
    };
    // Writing to a String cannot fail.
    for gpu in &found.devices {
        let node = gpu.numa_node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
        let (number, name, uuid, pci) = (gpu.number, &gpu.name, &gpu.uuid, &gpu.pci);
        let _ = writeln!(text, "cuda:{number}  {name}, {}, {uuid} at {pci}{node}", human::bytes(gpu.bytes));
    }
    if found.devices.is_empty() {
        text.push_str("no GPU\n");
    }
    let mut table = Table::new(&[
        ("transport", Side::Left),
        ("memory", Side::Left),
        ("ready", Side::Left),
        ("why not", Side::Left),
    ]);
    for transport in &found.transports {
        for served in &transport.memory {
            let reason = served.reason.clone().unwrap_or_default();
            table.row(vec![transport.name.to_string(), short(&served.memory), yes(served.ready), reason]);
        }
    }
    let _ = write!(text, "\n{}", table.render());
    let mut table =
        Table::new(&[("check", Side::Left), ("of", Side::Left), ("ok", Side::Left), ("found", Side::Left)]);
    for check in &found.checks {
        let of = check.device.as_deref().map_or_else(|| "host".to_owned(), short);
        table.row(vec![check.name.to_owned(), of, yes(check.ok), check.found.clone()]);
    }
    let _ = write!(text, "\n{}", table.render());
    let mut remedies: Vec<(String, &str)> = Vec::new();
    let transports = found.transports.iter().filter_map(|t| Some((t.name.to_string(), t.remedy.as_deref()?)));
    let checks = found.checks.iter().filter_map(|c| Some((c.name.to_owned(), c.remedy.as_deref()?)));
    for (name, remedy) in checks.chain(transports) {
        if !remedies.iter().any(|(_, said)| *said == remedy) {
            remedies.push((name, remedy));
        }
    }
    if !remedies.is_empty() {
        text.push_str("\nTo mend it\n");
    }
    for (name, remedy) in remedies {
        let _ = writeln!(text, "  {name}: {remedy}");
    }
    text
}
