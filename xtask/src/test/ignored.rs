//! Which test cases a run ignored and why, against the committed list.
//!
//! `xtask/ignored.txt` is the list of a machine without a GPU: one line a case, `TARGET CASE: REASON`, sorted.
//! A case that is ignored without being on it, or on it without being ignored, is drift and a failure, unless its
//! reason says what it *needs* (a privilege, reserved huge pages): those differ between machines and are shown.

use crate::workspace::Workspace;
use anyhow::{Context as _, Result, bail};
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Component, Path},
};

const LIST: &str = "xtask/ignored.txt";
const HEADER: &str = "\
# Cases that a machine without a GPU ignores, and why: `TARGET CASE: REASON`.
# Written by `cargo xtask test --bless-ignored`; `cargo xtask test` fails when a run differs.
";

/// The ignored cases of one run, as lines of the list.
pub(crate) type Cases = BTreeSet<String>;

/// Reads what `cargo test` wrote. A case ignored without a reason is an error that names it.
pub(crate) fn parse(output: &str) -> Result<Cases> {
    let mut target = String::from("?");
    let mut cases = Cases::new();
    for line in output.lines() {
        if let Some(found) = target_of(line) {
            target = found;
        } else if let Some((case, reason)) = ignored_case(line) {
            let Some(reason) = reason else {
                bail!("{target} {case} is ignored without a reason: say why in its #[ignore = \"…\"]");
            };
            cases.insert(format!("{target} {case}: {reason}"));
        }
    }
    Ok(cases)
}

/// Compares with the committed list, or rewrites it.
pub(crate) fn compare(workspace: &Workspace, cases: &Cases, bless: bool) -> Result<()> {
    if bless {
        let lines: String = cases.iter().map(|case| format!("{case}\n")).collect();
        return fs::write(workspace.path(LIST), format!("{HEADER}{lines}")).context(LIST);
    }
    let (of_this_machine, drift): (Vec<_>, Vec<_>) =
        drift(&workspace.read(LIST)?, cases).into_iter().partition(|line| says_what_it_needs(line));
    for line in of_this_machine {
        println!("on this machine: {line}");
    }
    if !drift.is_empty() {
        bail!(
            "this run's ignored cases differ from {LIST} (- listed, + ignored now); if that is right, \
             `cargo xtask test --bless-ignored`\n{}",
            drift.join("\n")
        );
    }
    Ok(())
}

/// Whether this machine has a GPU, so that the list is not about it.
pub(crate) fn has_gpu() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// Whether this user may act as others and mount, which some cases need.
pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn drift(list: &str, cases: &Cases) -> Vec<String> {
    let listed: Cases =
        list.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).map(str::to_owned).collect();
    let gone = listed.difference(cases).map(|case| format!("- {case}"));
    let new = cases.difference(&listed).map(|case| format!("+ {case}"));
    gone.chain(new).collect()
}

/// Whether the reason of a line of the list is something that another machine may have.
fn says_what_it_needs(line: &str) -> bool {
    line.split_once(": ")
        .is_some_and(|(_, why)| why.trim_start_matches("not run here: ").starts_with("needs "))
}

/// The test target that cargo says it runs next: `flashboot_core`, or `flashboot_core doc`.
fn target_of(line: &str) -> Option<String> {
    let line = line.trim_start();
    if let Some(krate) = line.strip_prefix("Doc-tests ") {
        return Some(format!("{} doc", krate.trim()));
    }
    // `Running unittests src/lib.rs (target/debug/deps/flashboot_core-0123456789abcdef)`
    let (_, binary) = line.strip_prefix("Running ")?.strip_suffix(')')?.rsplit_once('(')?;
    let Component::Normal(name) = Path::new(binary).components().next_back()? else { return None };
    let name = name.to_str()?;
    Some(name.rsplit_once('-').map_or(name, |(front, _)| front).to_owned())
}

/// The case and its reason, of one of these lines:
///
/// ```text
/// test NAME ... ignored, REASON            libtest
/// test NAME ... ignored (REASON)           libtest-mimic, found out while it ran
/// test [REASON] NAME ... ignored           libtest-mimic, known before, the kind saying why
/// ```
fn ignored_case(line: &str) -> Option<(String, Option<String>)> {
    let (name, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ignored")?;
    let (kind, name) = match name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((kind, name)) => (Some(kind.trim()), name),
        None => (None, name),
    };
    let verdict = verdict.trim();
    let reason = verdict
        .strip_prefix(", ")
        .or_else(|| verdict.strip_prefix('(')?.strip_suffix(')'))
        .or(kind)
        .filter(|reason| !reason.is_empty());
    Some((without_line_number(name.trim()), reason.map(str::to_owned)))
}

/// Documentation tests carry the line they stand on, which moves.
fn without_line_number(name: &str) -> String {
    match name.rsplit_once(" (line ") {
        Some((front, _)) => front.to_owned(),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
     Running unittests src/lib.rs (target/debug/deps/flashboot_memory-0123456789abcdef)

running 3 tests
test arena::huge_pages ... ignored, no huge pages are reserved
test arena::seals ... ok
test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/conformance.rs (target/debug/deps/conformance-fedcba9876543210)
test [no GPU]   gpu_to_gpu     ... ignored
test            poisoned       ... ignored (needs a second host)
test [ipc]      replicates     ... ok
   Doc-tests flashboot_core
test core/src/size.rs - ByteSize (line 7) ... ok
";

    #[test]
    fn what_another_machine_may_have_is_no_drift() {
        assert!(says_what_it_needs("+ processes full_disk: not run here: needs unshare -m"));
        assert!(says_what_it_needs("- arena huge: needs 32 free huge pages: sysctl vm.nr_hugepages=32"));
        assert!(!says_what_it_needs("+ conformance broadcast/chain/4: no libcuda.so.1; install the driver"));
        assert!(!says_what_it_needs("+ reference mixtral: not run here: no models"));
    }

    #[test]
    fn every_form_of_an_ignored_case_is_read_with_its_target_and_reason() {
        let expected = [
            "conformance gpu_to_gpu: no GPU",
            "conformance poisoned: needs a second host",
            "flashboot_memory arena::huge_pages: no huge pages are reserved",
        ];
        assert_eq!(parse(OUTPUT).unwrap(), expected.map(String::from).into());
    }

    #[test]
    fn a_case_ignored_without_a_reason_is_refused() {
        let doc = "   Doc-tests flashboot\ntest src/lib.rs - x (line 3) ... ignored\n";
        assert_eq!(
            parse(doc).unwrap_err().to_string(),
            "flashboot doc src/lib.rs - x is ignored without a reason: say why in its #[ignore = \"…\"]"
        );
        assert!(parse("test a ... ignored\n").is_err());
    }

    #[test]
    fn drift_is_shown_in_both_directions() {
        let cases: Cases = ["a b: c".to_owned(), "d e: f".to_owned()].into();
        assert_eq!(drift("# x\na b: c\n\nd e: g\n", &cases), ["- d e: g", "+ d e: f"]);
        assert_eq!(drift("a b: c\nd e: f\n", &cases), [""; 0]);
    }
}
