//! Named, timed stages and what is said about them at the end.

use anyhow::Result;
use std::{
    fmt::Write as _,
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
        let start = Instant::now();
        let end = body().map_err(|e| format!("{e:#}"));
        self.note(Stage { name: name.into(), end, took: start.elapsed() })
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
