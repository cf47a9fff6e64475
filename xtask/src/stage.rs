//! Named, timed stages and what is said about them at the end.

use anyhow::Result;
use std::{
    fmt::Write as _,
    panic::resume_unwind,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

/// How a stage ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It ran and everything held.
    Passed,
    /// It could not run here, for this reason. Never counted as passed.
    Skipped(String),
}

/// What is known about the stages that have run.
#[derive(Debug, Default)]
pub(crate) struct Stages(Vec<Stage>);

#[derive(Debug)]
struct Stage {
    name: String,
    end: Result<Outcome, String>,
    took: Duration,
}

impl Stages {
    /// Runs one stage, says its verdict on a line, and gives whether it passed. An error is its failure.
    pub(crate) fn run(&mut self, name: &str, body: impl FnOnce() -> Result<Outcome>) -> bool {
        self.note(Stage::of(name, body))
    }

    /// Runs stages that do not disturb each other, as many at once as there are cores; says the verdicts at the end,
    /// in the order of `names`.
    pub(crate) fn run_together(&mut self, names: &[String], body: impl Fn(&str) -> Result<Outcome> + Sync) {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut ended = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(name) = names.get(number) else { return ended };
                ended.push((number, Stage::of(name, || body(name))));
            }
        };
        let mut ended: Vec<_> = thread::scope(|scope| {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
            workers
                .into_iter()
                .flat_map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect()
        });
        ended.sort_by_key(|(number, _)| *number);
        for (_, stage) in ended {
            self.note(stage);
        }
    }

    fn note(&mut self, stage: Stage) -> bool {
        println!("{}", stage.row());
        if let Err(why) = &stage.end {
            println!("{why}");
        }
        let passed = stage.end == Ok(Outcome::Passed);
        self.0.push(stage);
        passed
    }

    /// Whether nothing failed.
    pub(crate) fn ok(&self) -> bool {
        self.count(|end| end.is_err()) == 0
    }

    /// Every stage with its verdict and time, the failures' first lines, and the closing line.
    pub(crate) fn summary(&self) -> String {
        let mut text = String::from("\n");
        for stage in &self.0 {
            let _ = writeln!(text, "{}", stage.row());
            if let Err(why) = &stage.end {
                let _ = writeln!(text, "            {}", why.lines().next().unwrap_or_default());
            }
        }
        let _ = write!(
            text,
            "\n{} passed, {} failed, {} skipped",
            self.count(|end| *end == Ok(Outcome::Passed)),
            self.count(|end| end.is_err()),
            self.count(|end| matches!(end, Ok(Outcome::Skipped(_)))),
        );
        text
    }

    fn count(&self, which: impl Fn(&Result<Outcome, String>) -> bool) -> usize {
        self.0.iter().filter(|stage| which(&stage.end)).count()
    }
}

impl Stage {
    fn of(name: &str, body: impl FnOnce() -> Result<Outcome>) -> Self {
        let start = Instant::now();
        let end = body().map_err(|e| format!("{e:#}"));
        Self { name: name.into(), end, took: start.elapsed() }
    }

    fn row(&self) -> String {
        let (verdict, reason) = match &self.end {
            Ok(Outcome::Passed) => ("passed", String::new()),
            Ok(Outcome::Skipped(reason)) => ("skipped", format!(": {reason}")),
            Err(_) => ("FAILED", String::new()),
        };
        format!("{:>8.1} s  {:<28} {verdict}{reason}", self.took.as_secs_f64(), self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_that_run_together_are_told_in_their_order_each_with_its_own_verdict() {
        let names: Vec<String> = (0..20).map(|number| format!("s{number}")).collect();
        let mut stages = Stages::default();
        stages.run_together(&names, |name| match name {
            "s7" => anyhow::bail!("broken"),
            _ => Ok(Outcome::Passed),
        });
        let summary = stages.summary();
        let told: Vec<_> = summary.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
        assert_eq!(
            told.get(..20),
            Some(&names[..]).map(|names| names.iter().map(String::as_str).collect::<Vec<_>>()).as_deref()
        );
        assert!(summary.contains("s7                           FAILED\n            broken\n"), "{summary}");
        assert_eq!(summary.lines().last(), Some("19 passed, 1 failed, 0 skipped"));
    }

    #[test]
    fn what_cannot_run_is_shown_as_skipped_with_its_reason_and_never_counted_as_passed() {
        let mut stages = Stages::default();
        assert!(stages.run("a", || Ok(Outcome::Passed)));
        assert!(!stages.run("b", || Ok(Outcome::Skipped("no nightly".into()))));
        assert!(stages.ok());
        assert!(!stages.run("c", || anyhow::bail!("first\nsecond")));
        assert!(!stages.ok());
        let summary = stages.summary();
        assert!(summary.contains("b                            skipped: no nightly\n"), "{summary}");
        assert!(summary.contains("FAILED\n            first\n"), "{summary}");
        assert_eq!(summary.lines().last(), Some("1 passed, 1 failed, 1 skipped"));
    }
}
