//! `cargo xtask bench`: what was measured on this machine, next to what was aimed at, in one table.
//!
//! A bench is an example of a crate. Whatever it prints before, its **last line on stdout** is one JSON object:
//!
//! ```json
//! {"rows": [{"name": "pull ÷ memcpy", "target": "≥ 0.9", "measured": 1.02, "ok": true, "how": "1GiB, warm"}]}
//! ```
//!
//! `target` is `≥` or `≤`, a space, a number, and perhaps a space and a unit. `ok` must agree with it, so that a
//! bench cannot call its own figure good enough. Other fields, no rows and empty texts are refused. Figures
//! vary with the machine and its neighbours: a short one is written down as short and fails nothing.

use crate::{built::Built, shell, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use std::{fmt::Write as _, fs, process::Command, thread};

const RESULTS: &str = "docs/results/foundation.md";

/// The benches in the order of the table: package and example.
const BENCHES: [(&str, &str); 7] = [
    ("flashboot-memory", "bench_copy"),
    ("flashboot-checkpoint", "bench_checkpoint"),
    ("flashboot-checkpoint", "bench_layouts"),
    ("flashboot-cli", "bench_replicate"),
    ("flashboot-backend-tcp", "bench_loopback"),
    ("flashboot-sim", "bench_fleet"),
    ("flashboot-rendezvous", "bench_server"),
];

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Report {
    rows: Vec<Row>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    target: String,
    measured: f64,
    ok: bool,
    how: String,
}

/// A bench that ran: its command and what it found.
struct Ran {
    command: String,
    report: Report,
}

/// Runs the benches that exist and writes the table. A bench that fails leaves the old table as it is.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    let metadata = workspace.metadata()?;
    let exists = |package: &str, example: &str| {
        metadata
            .packages
            .iter()
            .filter(|p| p.name == package)
            .flat_map(|p| &p.targets)
            .any(|t| t.is_example() && t.name == example)
    };
    let mut ran = Vec::new();
    let there = BENCHES.iter().filter(|(package, example)| exists(package, example));
    let targets: Vec<_> =
        there.map(|(package, example)| format!("-p {package} --example {example}")).collect();
    let built = Built::by(workspace, &format!("build --release {}", targets.join(" ")))?;
    for (package, example) in BENCHES {
        if !exists(package, example) {
            println!("ignored: {package} has no example {example} yet");
            continue;
        }
        let words = format!("run --release -p {package} --example {example}");
        let mut bench = built.command((package, "example", example))?;
        let output = shell::stdout_of(bench.current_dir(workspace.root()))?;
        let report = parse(&output).with_context(|| format!("the last line of `cargo {words}`"))?;
        ran.push(Ran { command: format!("cargo {words}"), report });
    }
    if ran.is_empty() {
        println!("no bench ran; {RESULTS} is as it was");
        return Ok(true);
    }
    let text = document(&Machine::read()?, &ran);
    println!("{text}");
    fs::create_dir_all(workspace.path("docs/results"))?;
    fs::write(workspace.path(RESULTS), text).context(RESULTS)?;
    Ok(true)
}

fn parse(output: &str) -> Result<Report> {
    let last = output.trim_end().lines().next_back().context("it printed nothing")?;
    let report: Report = serde_json::from_str(last).with_context(|| format!("`{last}` is no report"))?;
    if report.rows.is_empty() {
        bail!("a report without rows");
    }
    for row in &report.rows {
        check(row).with_context(|| format!("row `{}`", row.name))?;
    }
    Ok(report)
}

fn check(row: &Row) -> Result<()> {
    for (field, text) in [("name", &row.name), ("how", &row.how)] {
        if text.trim().is_empty() || text.contains(['|', '\n']) {
            bail!("its {field} is empty or breaks a table: `{text}`");
        }
    }
    let meets = Target::parse(&row.target)?.is_met_by(row.measured);
    if meets != row.ok {
        bail!(
            "it says ok = {}, but {} {} {}",
            row.ok,
            row.measured,
            if meets { "is" } else { "is not" },
            row.target
        );
    }
    Ok(())
}

/// `≥ 0.9`, `≤ 30 s`.
struct Target {
    at_least: bool,
    bound: f64,
}

impl Target {
    fn parse(text: &str) -> Result<Self> {
        let wrong = || format!("target `{text}` is not `≥ NUMBER` or `≤ NUMBER`, with perhaps a unit");
        let (sign, rest) = text.split_once(' ').with_context(wrong)?;
        let at_least = match sign {
            "≥" => true,
            "≤" => false,
            _ => bail!(wrong()),
        };
        let (number, unit) = rest.split_once(' ').unwrap_or((rest, ""));
        let bound: f64 = number.parse().ok().filter(|n: &f64| n.is_finite()).with_context(wrong)?;
        if unit.contains(['|', '\n']) {
            bail!(wrong());
        }
        Ok(Self { at_least, bound })
    }

    fn is_met_by(&self, measured: f64) -> bool {
        if self.at_least { measured >= self.bound } else { measured <= self.bound }
    }
}

/// What the figures depend on.
struct Machine {
    date: String,
    kernel: String,
    cpu: String,
    cores: usize,
}

impl Machine {
    fn read() -> Result<Self> {
        let trimmed = |text: String| text.trim().to_owned();
        let cpus = shell::quiet(Command::new("lscpu").env("LC_ALL", "C")).unwrap_or_default();
        let cpu = cpus.lines().find_map(|line| line.strip_prefix("Model name:")).unwrap_or("unknown");
        Ok(Self {
            date: trimmed(shell::quiet(Command::new("date").args(["-u", "+%Y-%m-%d"]))?),
            kernel: trimmed(fs::read_to_string("/proc/sys/kernel/osrelease")?),
            cpu: trimmed(cpu.to_owned()),
            cores: thread::available_parallelism()?.get(),
        })
    }
}

fn document(machine: &Machine, ran: &[Ran]) -> String {
    let Machine { date, kernel, cpu, cores } = machine;
    let mut text = format!(
        "# Foundation: measured\n\nWritten by `cargo xtask bench` on {date}: Linux {kernel}, {cpu}, {cores} cores. One run, on a machine \
         that may be shared; ratios compare two figures of the same run.\n\n\
         | figure | measured | target | verdict | how |\n|---|---|---|---|---|\n"
    );
    for row in ran.iter().flat_map(|bench| &bench.report.rows) {
        let Row { name, target, measured, ok, how } = row;
        let verdict = if *ok { "ok" } else { "short" };
        let _ = writeln!(text, "| {name} | {measured:.3} | {target} | {verdict} | {how} |");
    }
    text.push_str("\nCommands:\n\n```sh\n");
    for bench in ran {
        let _ = writeln!(text, "{}", bench.command);
    }
    text.push_str("```\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"rows":[{"name":"pull","target":"≥ 0.9","measured":1.02,"ok":true,"how":"1GiB"},{"name":"start","target":"≤ 30 s","measured":31.5,"ok":false,"how":"cold"}]}"#;

    #[test]
    fn the_last_line_is_the_report() {
        let report = parse(&format!("warming up\n{GOOD}\n")).unwrap();
        assert_eq!(report.rows.len(), 2);
        let machine = Machine { date: "2026-01-01".into(), kernel: "6.1".into(), cpu: "X".into(), cores: 2 };
        let text = document(&machine, &[Ran { command: "cargo run".into(), report }]);
        assert!(text.contains("| pull | 1.020 | ≥ 0.9 | ok | 1GiB |\n"), "{text}");
        assert!(text.contains("| start | 31.500 | ≤ 30 s | short | cold |\n"), "{text}");
    }

    #[test]
    fn a_report_that_is_not_exactly_one_is_refused() {
        for (from, to) in [
            ("\"ok\":true", "\"ok\":false"),
            ("\"how\":\"1GiB\"", "\"how\":\"\""),
            ("\"how\":\"1GiB\"", "\"how\":\"1|2\""),
            ("\"how\":\"1GiB\"", "\"how\":\"1GiB\",\"extra\":1"),
            ("≥ 0.9", "about 0.9"),
            ("≥ 0.9", "≥0.9"),
            ("1.02", "\"1.02\""),
        ] {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD, "{from} is in it");
            assert!(parse(&text).is_err(), "{text}");
        }
        assert!(parse("").is_err());
        assert!(parse("{\"rows\":[]}").is_err());
        assert!(parse(&format!("{GOOD}\ndone\n")).is_err(), "the last line, not some line");
    }
}
