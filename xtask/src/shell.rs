//! Running commands: quietly with the output kept for a failure, or in sight while it is also read.

use anyhow::{Context as _, Result, bail};
use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
};

/// The command as a person would type it, without environment and folder.
pub(crate) fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    std::iter::once(program.file_name().unwrap_or(program.as_os_str()))
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Runs with the output in sight; a non-zero exit is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().with_context(|| line(command))?;
    if !status.success() {
        bail!("`{}` ended with {status}", line(command));
    }
    Ok(())
}

/// Runs and gives both streams as one text; a non-zero exit is an error that ends with that text.
pub(crate) fn quiet(command: &mut Command) -> Result<String> {
    let (ok, text) = captured(command, |_| {})?;
    if !ok {
        bail!("`{}` failed:\n{}", line(command), text.trim_end());
    }
    Ok(text)
}

/// Runs with the output in sight and gives it as well: whether it succeeded, and both streams in the order
/// they were written.
pub(crate) fn tee(command: &mut Command) -> Result<(bool, String)> {
    captured(command, |bytes| {
        // Nothing to do about a reader that has gone away: the verdict does not depend on it.
        let _ = io::stdout().write_all(bytes);
    })
}

/// Runs and gives what it wrote to stdout; stderr stays in sight.
pub(crate) fn stdout_of(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().with_context(|| line(command))?;
    if !output.status.success() {
        bail!("`{}` ended with {}", line(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` wrote no UTF-8", line(command)))
}

/// Whether the program can be started and says so by exit code 0; its output is dropped.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn captured(command: &mut Command, mut each_line: impl FnMut(&[u8])) -> Result<(bool, String)> {
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| line(command))?;
    // The command keeps our write ends until it is given others; with them open the pipe would never end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut reader = BufReader::new(reader);
    let mut all = Vec::new();
    loop {
        let before = all.len();
        if reader.read_until(b'\n', &mut all)? == 0 {
            break;
        }
        each_line(all.get(before..).unwrap_or_default());
    }
    let ok = child.wait()?.success();
    Ok((ok, String::from_utf8_lossy(&all).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_streams_come_back_in_order_and_the_exit_code_is_told() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; echo three; exit 3"]);
        assert_eq!(captured(&mut command, |_| {}).unwrap(), (false, "one\ntwo\nthree\n".into()));
        assert!(quiet(&mut command).unwrap_err().to_string().ends_with("failed:\none\ntwo\nthree"));
    }

    #[test]
    fn a_missing_program_does_not_succeed() {
        assert!(!succeeds(&mut Command::new("no-such-program-here")));
        assert!(succeeds(&mut Command::new("true")));
    }
}
