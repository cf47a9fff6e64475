//! What the console says of each program.

use super::plan::Program;
use crate::{shell, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use std::{fmt::Write as _, fs, process::Command};

/// One program's part of the console.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    pub(crate) name: String,
    /// `None`: it never ended.
    pub(crate) status: Option<i32>,
    /// Seconds.
    pub(crate) took: f64,
    pub(crate) output: String,
}

/// The parts in the order they ran.
pub(crate) fn parts(console: &str) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut open = false;
    for line in console.lines() {
        if let Some(name) = line.strip_prefix("@begin ") {
            parts.push(Part { name: name.into(), status: None, took: 0.0, output: String::new() });
            open = true;
        } else if let (true, Some(part)) = (open, parts.last_mut()) {
            if let Some(end) = line.strip_prefix("@end ") {
                let words: Vec<_> = end.split_whitespace().collect();
                if let [_, status, began, ended] = words.as_slice() {
                    part.status = status.parse().ok();
                    part.took = ended.parse().unwrap_or(0.0) - began.parse().unwrap_or(0.0);
                }
                open = false;
            } else {
                part.output.push_str(line);
                part.output.push('\n');
            }
        }
    }
    parts
}

/// One sentence and the output's end for each program that did not pass, did not end or did not run.
pub(crate) fn failures(programs: &[Program], parts: &[Part]) -> Vec<String> {
    let mut failures = Vec::new();
    for program in programs {
        let part = parts.iter().find(|part| part.name == program.name);
        let why = match part.map(|part| part.status) {
            Some(Some(0)) => continue,
            Some(Some(143 | 124)) => "took too long".to_owned(),
            Some(Some(status)) => format!("ended with {status}"),
            Some(None) => "never ended".to_owned(),
            None => "did not run".to_owned(),
        };
        let output = part.map_or("", |part| part.output.trim_end());
        failures.push(format!("{}: {why}\n{output}", program.name));
    }
    failures
}

/// A line each, and the whole output of what failed.
pub(crate) fn table(programs: &[Program], parts: &[Part]) -> String {
    let mut text = String::new();
    for part in parts {
        let verdict = if part.status == Some(0) { "passed" } else { "FAILED" };
        let last = part.output.lines().rfind(|line| line.contains("test result")).unwrap_or_default();
        let _ = writeln!(text, "{:>8.1} s  {:<28} {verdict}  {last}", part.took, part.name);
    }
    for failure in failures(programs, parts) {
        let _ = writeln!(text, "{failure}");
    }
    text
}

const RESULTS: &str = "docs/results/rdma-vm.md";

/// Writes the bench's table.
pub(crate) fn write_bench(workspace: &Workspace, parts: &[Part]) -> Result<()> {
    let part = parts.iter().find(|part| part.name == "bench" && part.status == Some(0));
    let Some(part) = part else { bail!("the bench did not end well; {RESULTS} is as it was") };
    let rows: Vec<&str> = part.output.lines().filter(|line| line.starts_with("| ")).collect();
    let counters = part.output.lines().find_map(|line| line.strip_prefix("@counters ")).unwrap_or_default();
    let date = shell::quiet(Command::new("date").arg("+%Y-%m-%d"))?;
    let text = format!(
        "# READs of payload in the virtual machine\n\n\
         `cargo xtask rdma-vm --bench`, {}: soft-RoCE (rxe) between the two devices of one veth pair, QEMU under software\n\
         emulation, two emulated cores. Medians of seven alternated runs of 64 MiB each; path MTU 4096, 16 READs in flight on\n\
         both sides, no hashing. `ib_read_bw` waits for events (`--events`), as our thread does after 50 µs: a program that\n\
         polls takes a core from the emulated NICs.\n\n\
         | message | ours, MB/s | `ib_read_bw`, MB/s | ratio (target ≥ 0.9) |\n|---|---|---|---|\n{}\n\n\
         The rates are an emulator's and mean nothing by themselves: each packet is made, summed and copied by the same two\n\
         cores that run both programs. The ratio says that our way of posting READs and taking completions keeps such a NIC as\n\
         busy as perftest's does, and costs it no more of the cores. What a real NIC does, whose limit is the wire, it does not\n\
         say: that was not measured.\n\n\
         Counters of the last run: {counters}.\n\
         In every run of the tests `reads_are_as_designed` holds them: 16 MiB in messages of 256 KiB are 64 READs, at most 16 of\n\
         them in flight; each signalled one makes one completion, at most half are signalled. No core copies a byte:\n\
         `no_core_touches_the_payload` takes both ends' pages away from the process while they are read.\n",
        date.trim(),
        rows.join("\n"),
    );
    println!("{text}");
    fs::write(workspace.path(RESULTS), text).context(RESULTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSOLE: &str = "[0.1] kernel\n@started\n@begin a\nhello\n@end a 0 1.00 3.50\n@begin b\nbad\n@end b 7 4 5\n@begin c\nstill\n";

    #[test]
    fn each_part_has_its_status_and_its_output() {
        let found = parts(CONSOLE);
        let part = |name: &str, status, took, output: &str| Part {
            name: name.into(),
            status,
            took,
            output: output.into(),
        };
        let expected = [
            part("a", Some(0), 2.5, "hello\n"),
            part("b", Some(7), 1.0, "bad\n"),
            part("c", None, 0.0, "still\n"),
        ];
        assert_eq!(found, expected);
    }
}
