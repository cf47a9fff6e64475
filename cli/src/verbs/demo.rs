//! `flashboot demo`: everything, on a real model.

use super::{inspect, open_options, pack, replicate, unpack, verify};
use crate::{
    demo::fetch,
    exit::{Code, Failure},
    human,
    output::Output,
    progress::Bar,
};
use clap::Args;
use flashboot::{
    config::{Chunk, Config, Topology},
    replicate::{Outcome, Report},
    scratch::Scratch,
};
use flashboot_checkpoint::{
    Checkpoint, DiffReport, Image, Inspection, PackOptions, PackReport, UnpackOptions, UnpackReport,
    VerifyOptions, VerifyReport,
};
use flashboot_core::{BLOCK, ByteSize, Error, Kind};
use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    time::Instant,
};

const CLONES: u32 = 4;

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// A checkpoint of your own instead of the one that is fetched
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Keep image and unpacked checkpoint here (a directory that does not exist)
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

#[derive(serde::Serialize)]
struct Demo {
    model: String,
    inspect: Inspection,
    pack: PackReport,
    verify: VerifyReport,
    replicate: Vec<Report>,
    unpack: UnpackReport,
    diff: DiffReport,
    /// Whether every unpacked file equals the source's, byte for byte.
    bit_equal: bool,
}

pub(crate) fn run(args: &DemoArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let place = Place::new(args.keep.as_deref())?;
    let model = match &args.model {
        Some(path) => path.clone(),
        None => fetch::model(config.cache.as_deref(), output)?,
    };
    let options = open_options(config);
    let inspection = flashboot_checkpoint::inspect(&model, &options)?;
    output.text(&format!(
        "model     {}: {} in {}, {}\n",
        model.display(),
        human::count(inspection.tensors, "tensor"),
        human::bytes(inspection.bytes),
        inspect::dtypes(&inspection),
    ))?;

    let (image_dir, back) = (place.path.join("image"), place.path.join("unpacked"));
    let began = Instant::now();
    let checkpoint = Checkpoint::open(&model, &options)?;
    let bar = Bar::new(output, "packing");
    let packed = flashboot_checkpoint::pack(&checkpoint, &image_dir, &PackOptions::default(), &bar)?;
    drop(bar);
    output.text(&pack::line(&packed, began.elapsed()))?;

    let began = Instant::now();
    let image = Image::open(&image_dir)?;
    let bar = Bar::new(output, "verifying");
    let verified = flashboot_checkpoint::verify(&image, &VerifyOptions::default(), &bar)?;
    drop(bar);
    output.text(&verify::text(&verified, began.elapsed()))?;
    if !verified.ok {
        return Err(failed("the image that was just packed does not verify"));
    }

    let mut reports = Vec::new();
    for topology in [Topology::Chain, Topology::Star] {
        let mut config = config.clone();
        config.replicate.clones = CLONES;
        config.replicate.topology = topology;
        config.replicate.chunk = Chunk::Bytes(ByteSize(BLOCK));
        let Outcome { report, error } =
            replicate::replicate(replicate::source(&image, None)?, &config, None)?;
        output.text(&format!("\nreplicate {}", replicate::text(&report)))?;
        if let Some(error) = error {
            return Err(error.into());
        }
        if report.verify && report.clones.iter().any(|clone| clone.verified != report.blocks) {
            return Err(failed("a clone has not verified every block"));
        }
        reports.push(report);
    }

    let began = Instant::now();
    let bar = Bar::new(output, "unpacking");
    let unpacked = flashboot_checkpoint::unpack(&image, &back, &UnpackOptions::default(), &bar)?;
    drop(bar);
    output.text(&format!("\n{}", unpack::line(&unpacked, began.elapsed())))?;
    let diff = flashboot_checkpoint::diff(&model, &back, &options)?;
    let files = checkpoint.shards().iter().map(|shard| (&shard.path, &shard.name));
    let files = files.chain(checkpoint.index().map(|index| (&index.path, &index.name)));
    let bit_equal = files
        .clone()
        .try_fold(true, |equal, (path, name)| same_bytes(path, &back.join(name)).map(|same| equal && same))?;
    if !diff.equal || !bit_equal {
        return Err(failed("what was unpacked is not what was packed"));
    }
    output.text(&format!(
        "compared  {} equal the source's, byte for byte\n",
        human::count(files.count() as u64, "unpacked file")
    ))?;
    let kept = place.keep();
    if let Some(kept) = &kept {
        output.text(&format!("kept      {}\n", kept.display()))?;
    }
    let demo = Demo {
        model: model.to_string_lossy().into_owned(),
        inspect: inspection,
        pack: packed,
        verify: verified,
        replicate: reports,
        unpack: unpacked,
        diff,
        bit_equal,
    };
    output.result(&demo, String::new)?;
    Ok(Code::SUCCESS)
}

fn failed(what: &str) -> Failure {
    Error::new(Kind::Corrupt, "demo", what).into()
}

/// Where image and unpacked checkpoint go: a directory of their own, removed unless it is to be kept and all went well.
struct Place {
    path: PathBuf,
    kept: Kept,
}

enum Kept {
    No(#[expect(dead_code, reason = "removes the directory when dropped")] Scratch),
    /// Removed with it, if empty: the directories above it that were made for it, the lowest first.
    IfItSucceeds(Vec<PathBuf>),
    Yes,
}

impl Place {
    fn new(keep: Option<&Path>) -> Result<Self, Failure> {
        let io = |path: &Path, e: &std::io::Error| {
            Failure::from(Error::from_io("mkdir", e, path.display().to_string()))
        };
        let Some(path) = keep else {
            let parent = std::env::temp_dir();
            let scratch = Scratch::new(&parent, "flashboot-demo-").map_err(|e| io(&parent, &e))?;
            return Ok(Self { path: scratch.path().to_owned(), kept: Kept::No(scratch) });
        };
        let above = path.ancestors().skip(1).take_while(|a| !a.as_os_str().is_empty() && !a.exists());
        let above: Vec<_> = above.map(Path::to_owned).collect();
        if let Some(parent) = above.first() {
            std::fs::create_dir_all(parent).map_err(|e| io(parent, &e))?;
        }
        match std::fs::create_dir(path) {
            Ok(()) => Ok(Self { path: path.to_owned(), kept: Kept::IfItSucceeds(above) }),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Err(Failure::usage(format!(
                "--keep {}: already exists; name a new directory",
                path.display()
            ))),
            Err(e) => Err(io(path, &e)),
        }
    }

    /// The directory, if it stays.
    fn keep(mut self) -> Option<PathBuf> {
        if matches!(self.kept, Kept::No(_)) {
            return None;
        }
        self.kept = Kept::Yes;
        Some(self.path.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Kept::IfItSucceeds(above) = &self.kept {
            // What cannot be removed stays: the error that led here is the one to tell.
            let _ = std::fs::remove_dir_all(&self.path);
            let _ = above.iter().try_for_each(std::fs::remove_dir);
        }
    }
}

fn same_bytes(a: &Path, b: &Path) -> Result<bool, Failure> {
    let io = |path: &Path, e: &std::io::Error| {
        Failure::from(Error::from_io("read", e, path.display().to_string()))
    };
    let (mut one, mut other) = (File::open(a).map_err(|e| io(a, &e))?, File::open(b).map_err(|e| io(b, &e))?);
    let len = |file: &File, path| file.metadata().map(|m| m.len()).map_err(|e| io(path, &e));
    if len(&one, a)? != len(&other, b)? {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let n = one.read(&mut left).map_err(|e| io(a, &e))?;
        if n == 0 {
            return Ok(true);
        }
        let (Some(left), Some(right)) = (left.get(..n), right.get_mut(..n)) else { return Ok(false) };
        other.read_exact(right).map_err(|e| io(b, &e))?;
        if left != right {
            return Ok(false);
        }
    }
}
