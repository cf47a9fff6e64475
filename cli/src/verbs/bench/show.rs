//! The tables.

use super::{Report, Skipped};
use crate::{
    human,
    output::Output,
    table::{Side, Table},
};
use flashboot::bench::{Figures, nccl::NcclFigures};
use flashboot_core::{ByteSize, Error};
use std::{io::Write as _, time::Instant};

/// NCCL's columns: one of many queued, one by events, one as its caller sees it, and a new process's first.
const NCCL: [(&str, Side); 4] = [
    ("nccl queued", Side::Right),
    ("nccl gpu", Side::Right),
    ("nccl call", Side::Right),
    ("nccl cold", Side::Right),
];

/// A line on stderr for every stage that is measured, so that a long bench does not look dead.
pub(super) struct Progress {
    output: Output,
    what: &'static str,
    began: Instant,
}

impl Progress {
    pub(super) fn new(output: Output, what: &'static str) -> Self {
        Self { output, what, began: Instant::now() }
    }

    pub(super) fn stage(&self, figures: &Figures) {
        if self.output.is_json() {
            return;
        }
        if figures.topology == "import" {
            let import = figures.clones.first().map_or(0.0, |clone| clone.map_ms);
            let (began, bytes) = (self.began.elapsed().as_secs_f64(), ByteSize(figures.bytes));
            return say(&format!("{began:>6.1} s  {} {bytes}: imported in {}", self.what, time(import)));
        }
        say(&format!(
            "{:>6.1} s  {} {} {} x{} in {}{}: last ready {}",
            self.began.elapsed().as_secs_f64(),
            self.what,
            ByteSize(figures.bytes),
            figures.topology,
            figures.clones.len(),
            ByteSize(figures.chunk_bytes),
            if figures.verify { ", verified" } else { "" },
            time(figures.last_ms),
        ));
    }
}

/// One line on stderr.
fn say(line: &str) {
    // Whoever reads stderr may be gone.
    let _ = writeln!(std::io::stderr(), "{}", human::plain(line, false));
}

/// Why host memory is measured though nobody asked for it.
pub(super) fn no_gpus(why: &Error) {
    // Asked already, so it does not block; an answer that is late is none of the library.
    let absent = why.op() == "dlopen" && flashboot::bench::driver_is_absent();
    say(&match absent {
        true => format!("flashboot: host memory is measured: {}", why.detail()),
        false => format!("flashboot: host memory is measured, the GPUs cannot be used: {why}"),
    });
}

/// What there is no room for.
pub(super) fn skipped(skipped: &Skipped) {
    let Skipped { topology, ranks, bytes, reason } = skipped;
    let what = topology.map_or_else(|| "hash".to_owned(), |topology| format!("{topology} of {ranks}"));
    say(&format!("flashboot: not measured: {what}, {}: {reason}", ByteSize(*bytes)));
}

pub(super) fn summary(report: &Report) -> String {
    let mut text = match report.bench {
        "hash" => hashes(report),
        "copy" => copies(report),
        "setup" => setups(report),
        "load" => loads(report),
        _ => spreads(report),
    };
    if let Some(missing) = &report.nccl_missing {
        text += &format!("\nno NCCL beside it: {missing}\n");
    }
    text
}

/// `12.3 µs`, then as elsewhere.
fn time(ms: f64) -> String {
    if ms < 0.9995 { format!("{:.1} µs", ms * 1e3) } else { human::ms(ms) }
}

fn maybe(ms: Option<f64>) -> String {
    ms.map_or_else(|| "-".into(), time)
}

fn rate(bytes: u64, ms: Option<f64>) -> String {
    match ms {
        Some(ms) if ms > 0.0 => human::rate(bytes as f64 / ms * 1e3),
        _ => "-".into(),
    }
}

fn share(part: Option<f64>, whole: Option<f64>) -> String {
    match (part, whole) {
        (Some(part), Some(whole)) if whole > 0.0 => format!("{:.3}", part / whole),
        _ => "-".into(),
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".into(), |share| format!("{:.2} %", share * 1e2))
}

fn yes(verify: bool) -> String {
    if verify { "yes" } else { "no" }.into()
}

fn hashes(report: &Report) -> String {
    let mut table = Table::new(&[
        ("gpu", Side::Left),
        ("size", Side::Right),
        ("hash", Side::Right),
        ("rate", Side::Right),
    ]);
    for row in &report.hashes {
        let gpu = row.gpu.chars().take(12).collect();
        table.row(vec![
            gpu,
            ByteSize(row.bytes).to_string(),
            time(row.hash_ms),
            human::rate(row.bytes_per_s),
        ]);
    }
    table.render()
}

fn loads(report: &Report) -> String {
    let mut table = Table::new(&[
        ("page cache", Side::Left),
        ("files", Side::Right),
        ("only read", Side::Right),
        ("rate", Side::Right),
        ("rank", Side::Right),
        ("load", Side::Right),
        ("of it arena", Side::Right),
        ("rate without", Side::Right),
        ("ratio", Side::Right),
        ("by", Side::Left),
    ]);
    for row in &report.loads {
        table.row(vec![
            row.state.to_owned(),
            human::bytes(row.file_bytes),
            time(row.raw_ms),
            human::rate(row.raw_bytes_per_s),
            human::bytes(row.bytes),
            time(row.load_ms),
            time(row.bind_ms),
            human::rate(row.bytes_per_s),
            format!("{:.2}", row.ratio),
            row.engine.to_owned(),
        ]);
    }
    table.render()
}

fn setups(report: &Report) -> String {
    let mut table = Table::new(&[
        ("size", Side::Right),
        ("arena", Side::Right),
        ("export", Side::Right),
        ("import", Side::Right),
        ("driver's calls", Side::Right),
        ("over them", Side::Right),
    ]);
    for stage in &report.stages {
        let Some(clone) = stage.clones.first() else { continue };
        table.row(vec![
            ByteSize(stage.bytes).to_string(),
            time(stage.seed_arena_ms),
            time(stage.seed_export_ms),
            time(clone.map_ms),
            time(clone.driver_ms),
            time(clone.map_ms - clone.driver_ms),
        ]);
    }
    table.render()
}

fn nccl_of(report: &Report, bytes: u64) -> Option<&NcclFigures> {
    report.nccl.as_ref()?.iter().find(|figures| figures.bytes == bytes)
}

/// The limit that a row is held to, and the time by the same clock.
fn limit(stage: &Figures) -> (Option<f64>, Option<f64>) {
    let clone = stage.clones.first();
    if stage.verify {
        (stage.bound_ms, clone.and_then(|clone| clone.verified_ms))
    } else {
        (stage.raw_ms, clone.and_then(|clone| clone.copy_ms))
    }
}

fn copies(report: &Report) -> String {
    let mut columns = vec![
        ("size", Side::Right),
        ("verified", Side::Left),
        ("chunk", Side::Right),
        ("export", Side::Right),
        ("map", Side::Right),
        ("limit", Side::Right),
        ("gpu", Side::Right),
        ("of limit", Side::Right),
        ("lead", Side::Right),
        ("trail", Side::Right),
        ("ready", Side::Right),
        ("rate", Side::Right),
        ("of limit", Side::Right),
        ("with set-up", Side::Right),
    ];
    if report.nccl.is_some() {
        columns.extend(NCCL);
    }
    let mut table = Table::new(&columns);
    for stage in &report.stages {
        let Some(clone) = stage.clones.first() else { continue };
        let (limit, gpu) = limit(stage);
        let mut row = vec![
            ByteSize(stage.bytes).to_string(),
            yes(stage.verify),
            ByteSize(stage.chunk_bytes).to_string(),
            time(clone.export_ms),
            time(clone.map_ms),
            maybe(limit),
            maybe(gpu),
            share(limit, gpu),
            maybe(clone.lead_ms),
            maybe(clone.trail_ms),
            time(clone.ready_ms),
            rate(stage.bytes, Some(clone.ready_ms)),
            share(limit, Some(clone.ready_ms)),
            time(stage.total_ms),
        ];
        if report.nccl.is_some() {
            row.extend(nccl_of(report, stage.bytes).map_or_else(
                || vec!["-".into(); NCCL.len()],
                |nccl| {
                    vec![time(nccl.queued_ms), time(nccl.event_ms), time(nccl.wall_ms), maybe(nccl.cold_ms)]
                },
            ));
        }
        table.row(row);
    }
    let key = "limit: of a plain row one copy of everything, of a verified one the soonest that copy and hash can be done \
               together;\ngpu: first to last byte (and hash) by the GPU's events; ready: from the release to published, \
               by the host's clock,\nwith lead before the GPU's part and trail after it\n";
    format!("{}\n{key}", table.render())
}

fn spreads(report: &Report) -> String {
    let mut columns = vec![
        ("topology", Side::Left),
        ("ranks", Side::Right),
        ("size", Side::Right),
        ("chunk", Side::Right),
        ("verified", Side::Left),
        ("raw", Side::Right),
        ("raw together", Side::Right),
        ("ideal", Side::Right),
        ("first", Side::Right),
        ("last", Side::Right),
        ("of ideal", Side::Right),
        ("last's rate", Side::Right),
        ("slowest copy", Side::Right),
        ("idle", Side::Right),
        ("with hash", Side::Right),
        ("first to last", Side::Right),
        ("with set-up", Side::Right),
    ];
    if report.nccl.is_some() {
        columns.extend(NCCL);
    }
    let mut table = Table::new(&columns);
    for stage in &report.stages {
        let slowest = stage.clones.iter().filter_map(|clone| clone.copy_ms).reduce(f64::max);
        let mut row = vec![
            stage.topology.to_owned(),
            stage.clones.len().to_string(),
            ByteSize(stage.bytes).to_string(),
            ByteSize(stage.chunk_bytes).to_string(),
            yes(stage.verify),
            maybe(stage.raw_ms),
            maybe(stage.raw_together_ms),
            maybe(stage.ideal_ms),
            time(stage.first_ms),
            time(stage.last_ms),
            share(Some(stage.last_ms), stage.ideal_ms),
            rate(stage.bytes, Some(stage.last_ms)),
            maybe(slowest),
            percent(stage.idle),
            percent(stage.idle_gpu),
            percent(stage.idle_whole),
            time(stage.total_ms),
        ];
        if report.nccl.is_some() {
            row.extend(nccl_of(report, stage.bytes).map_or_else(
                || vec!["-".into(); NCCL.len()],
                |nccl| {
                    vec![time(nccl.queued_ms), time(nccl.event_ms), time(nccl.wall_ms), maybe(nccl.cold_ms)]
                },
            ));
        }
        table.row(row);
    }
    let key = "raw: one copy of everything by rank 1 alone; raw together: one copy of what a rank reads while all the others \
               copy too;\nideal: the schedule's steps at that pace while all copy, quicker while fewer do; idle: a link without a copy while \
               every hop on it is at work,\nwith hash: and without one between its copy and the end of its hash, first to last: without a copy from the first \
               one to the last,\nhowever few hops are at work\n";
    format!("{}\n{key}", table.render())
}
