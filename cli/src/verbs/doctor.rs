//! `flashboot doctor`.

use super::{
    replicate::{run_directory, runtime},
    service::Protection,
};
use crate::{
    exit::{Code, Failure},
    human, interrupt,
    output::Output,
    settings::Overrides,
    table::{Side, Table},
};
use clap::Args;
use flashboot::{
    config::Config,
    doctor::{
        self, Diagnosis, Request,
        peer::{self, Ours, Path},
    },
};
use flashboot_channel::Endpoint;
use flashboot_core::{ByteSize, Error};
use std::{fmt::Write as _, net::SocketAddr, time::Duration};

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
    /// Also read from and be read by the host that listens there: what `doctor --listen` printed
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "listen")]
    peer: Option<Endpoint>,
    /// Be the peer of others until a signal comes; prints where to reach it. tcp.advertise is what it is called
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// The bytes a second below which a path to the peer is degraded, not ready [default: 100MB]
    #[arg(long, value_name = "SIZE", requires = "peer")]
    floor: Option<ByteSize>,
    #[command(flatten)]
    protection: Protection,
}

impl DoctorArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.protection.overrides(into);
    }
}

/// Below a gigabit's worth nobody loads a model.
const FLOOR: ByteSize = ByteSize(100_000_000);

pub(crate) fn run(args: &DoctorArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    if args.timeout.is_some_and(|timeout| timeout.is_zero()) {
        return Err(Failure::usage("--timeout 0s leaves no time to look at anything"));
    }
    let request = Request {
        device: args.device.clone(),
        directory: run_directory(),
        network: config.network(),
        timeout: args.timeout.map_or(TIMEOUT, Into::into),
    };
    let ours = Ours {
        directory: run_directory(),
        network: config.network(),
        timeout: request.timeout,
        floor: args.floor.unwrap_or(FLOOR),
    };
    let runtime = runtime(false)?;
    if let Some(at) = args.listen {
        let advertise = config.tcp.advertise.as_ref().map(|advertised| &advertised.0);
        let told = |endpoint: &str| {
            // Whoever asked for one object gets one. A reader of stdout that is gone ends nothing.
            let _ = output.result(&serde_json::json!({ "endpoint": endpoint }), || format!("{endpoint}\n"));
        };
        runtime.block_on(async { peer::listen(at, advertise, &ours, told, interrupt::signalled()).await })?;
        return Ok(Code::SUCCESS);
    }
    let found = runtime.block_on(async {
        let mut found = doctor::doctor(request).await?;
        if let Some(endpoint) = &args.peer {
            found.paths = peer::meet(endpoint, &ours).await?;
        }
        Ok::<_, Error>(found)
    });
    // A driver that hangs keeps its thread; the process ends without it.
    runtime.shutdown_background();
    let found = found?;
    output.result(&found, || text(&found))?;
    Ok(Code::SUCCESS)
}

fn paths(paths: &[Path]) -> Table {
    let mut table = Table::new(&[
        ("path", Side::Left),
        ("reader", Side::Left),
        ("ready", Side::Left),
        ("4 KiB", Side::Right),
        ("rate", Side::Right),
        ("why not, or what to know", Side::Left),
    ]);
    for path in paths {
        let reader = match path.reader {
            peer::Side::Here => "here",
            peer::Side::Peer => "peer",
        };
        let ready = match (path.ready, path.degraded) {
            (true, _) => "yes",
            (false, true) => "degraded",
            (false, false) => "no",
        };
        table.row(vec![
            path.transport.to_string(),
            reader.to_owned(),
            ready.to_owned(),
            path.latency_us.map_or_else(String::new, |us| format!("{us:.0} µs")),
            path.bytes_per_s.map_or_else(String::new, human::rate),
            path.reason.iter().chain(&path.remarks).map(String::as_str).collect::<Vec<_>>().join("; "),
        ]);
    }
    table
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
    match found.visible {
        0 => text.push_str("no GPU\n"),
        n if found.devices.is_empty() => {
            let _ = writeln!(
                text,
                "the GPU asked for is not to be used; this process sees {}",
                human::count(n as u64, "GPU")
            );
        }
        _ => {}
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
    if !found.paths.is_empty() {
        let _ = write!(text, "\n{}", paths(&found.paths).render());
    }
    let mut remedies: Vec<(String, &str)> = Vec::new();
    let between = found
        .paths
        .iter()
        .filter_map(|p| Some((format!("{} to the peer", p.transport), p.remedy.as_deref()?)));
    let transports = found.transports.iter().filter_map(|t| Some((t.name.to_string(), t.remedy.as_deref()?)));
    let checks = found.checks.iter().filter_map(|c| Some((c.name.to_owned(), c.remedy.as_deref()?)));
    for (name, remedy) in checks.chain(transports).chain(between) {
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
