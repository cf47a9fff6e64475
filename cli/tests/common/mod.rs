//! What the tests of the command share: small checkpoints, and the real binary in a clean environment.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "each test file uses its own part; tests panic"
)]

pub(crate) mod fleet;
pub(crate) mod http;
pub(crate) mod stand_in;

use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tempfile::TempDir;

pub(crate) const MIB: usize = 1 << 20;

/// A directory with a checkpoint, and room beside it.
pub(crate) struct Place(pub(crate) TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::Builder::new().prefix("fb").tempdir().unwrap())
    }

    /// In memory, where the system has room for files there: for payloads that are compared and removed.
    pub(crate) fn in_memory() -> Self {
        let shared = tempfile::Builder::new().prefix("fb").tempdir_in("/dev/shm");
        shared.map_or_else(|_| Self::new(), Self)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The binary, in this directory, with nothing of this process's configuration.
    pub(crate) fn flashboot(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashboot"));
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("FLASHBOOT_"))
        {
            command.env_remove(name);
        }
        let run = self.path("run");
        fs::create_dir_all(&run).unwrap();
        command.args(args).current_dir(self.0.path()).env("TMPDIR", run).stdin(Stdio::null());
        command
    }

    /// What is left of runs: no directory of sockets may stay.
    pub(crate) fn left_over(&self) -> Vec<PathBuf> {
        fs::read_dir(self.path("run")).map(|d| d.map(|e| e.unwrap().path()).collect()).unwrap_or_default()
    }

    /// Runs it and gives exit code and the one object.
    pub(crate) fn json(&self, args: &[&str]) -> (i32, Value) {
        let output = self.flashboot(args).arg("--json").output().unwrap();
        (output.status.code().unwrap_or(-1), object(&output))
    }

    /// Runs it, wants exit 0, gives the object.
    pub(crate) fn ok(&self, args: &[&str]) -> Value {
        let output = self.flashboot(args).arg("--json").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", said(&output));
        object(&output)
    }

    /// A checkpoint of one file at `name`, packed into the image `name`.img.
    pub(crate) fn image(&self, name: &str, tensors: &[(&str, usize)]) -> PathBuf {
        let checkpoint = self.path(name);
        fs::create_dir_all(&checkpoint).unwrap();
        fs::write(checkpoint.join("model.safetensors"), safetensors(tensors)).unwrap();
        let image = self.path(&format!("{name}.image"));
        self.ok(&["pack", text(&checkpoint), "-o", text(&image)]);
        image
    }

    /// A checkpoint of one layer of two experts at `name`, whose weights have this shape or its transpose, packed into
    /// `name`.image, which has two ranks.
    pub(crate) fn two_ranks(&self, name: &str, [rows, columns]: [u64; 2]) -> PathBuf {
        let checkpoint = self.path(name);
        fs::create_dir_all(&checkpoint).unwrap();
        let config = r#"{"model_type":"deepseek_v4","n_routed_experts":2,"num_hidden_layers":1}"#;
        fs::write(checkpoint.join("config.json"), config).unwrap();
        let mut header =
            vec![r#""layers.0.attn.weight":{"dtype":"I8","shape":[16,8],"data_offsets":[0,128]}"#.to_owned()];
        let mut at = 128;
        for expert in 0..2 {
            for (w, shape) in [("w1", [rows, columns]), ("w2", [columns, rows]), ("w3", [rows, columns])] {
                let end = at + rows * columns;
                let name = format!("layers.0.ffn.experts.{expert}.{w}.weight");
                header.push(format!(
                    r#""{name}":{{"dtype":"I8","shape":{shape:?},"data_offsets":[{at},{end}]}}"#
                ));
                at = end;
            }
        }
        let header = format!("{{{}}}", header.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend((0..at).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8));
        fs::write(checkpoint.join("model.safetensors"), bytes).unwrap();
        let image = self.path(&format!("{name}.image"));
        self.ok(&["pack", text(&checkpoint), "-o", text(&image), "--tp", "2", "--ep", "2"]);
        image
    }
}

/// A document of the repository.
pub(crate) fn document(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)).unwrap()
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The only object on stdout.
pub(crate) fn object(output: &Output) -> Value {
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines.len(), 1, "one line of JSON wanted: {}", said(output));
    serde_json::from_str(lines[0]).unwrap()
}

pub(crate) fn said(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\nstdout: {out}\nstderr: {err}", output.status)
}

/// One safetensors file with U8 tensors of these sizes and bytes that depend on name and place.
pub(crate) fn safetensors(tensors: &[(&str, usize)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, bytes) in tensors {
        let begin = data.len();
        let salt = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        data.extend(
            (0..*bytes as u64).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(salt) >> 11) as u8),
        );
        let entry = json!({ "dtype": "U8", "shape": [bytes], "data_offsets": [begin, data.len()] });
        header.insert((*name).to_owned(), entry);
    }
    let header = serde_json::to_vec(&Value::Object(header)).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

/// Flips one bit of the byte at `at` (from the end when negative).
pub(crate) fn flip(path: &Path, at: i64) {
    let mut bytes = fs::read(path).unwrap();
    let at = if at < 0 { bytes.len() - usize::try_from(-at).unwrap() } else { usize::try_from(at).unwrap() };
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}
