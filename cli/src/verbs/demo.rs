//! `flashboot demo`: everything, on a real model.

use super::{inspect, open_options, pack, replicate, unpack, verify};
use crate::{demo::fetch, exit::Failure, human, output::Output, progress::Bar};
use clap::Args;
use flashboot::{
    config::{Chunk, Config, Topology},
    replicate::{Outcome, Report},
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
    process::ExitCode,
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
    model: PathBuf,
    inspect: Inspection,
    pack: PackReport,
    verify: VerifyReport,
    replicate: Vec<Report>,
    unpack: UnpackReport,
    diff: DiffReport,
    /// Whether every unpacked file equals the source's, byte for byte.
    bit_equal: bool,
}

pub(crate) fn run(args: &DemoArgs, config: &Config, output: Output) -> Result<ExitCode, Failure> {
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
        model,
        inspect: inspection,
        pack: packed,
        verify: verified,
        replicate: reports,
        unpack: unpacked,
        diff,
        bit_equal,
    };
    output.result(&demo, String::new)?;
    Ok(ExitCode::SUCCESS)
}

fn failed(what: &str) -> Failure {
    Error::new(Kind::Corrupt, "demo", what).into()
}

/// Where image and unpacked checkpoint go: a directory of their own, removed unless it is to be kept.
struct Place {
    path: PathBuf,
    temporary: Option<tempfile::TempDir>,
}

impl Place {
    fn new(keep: Option<&Path>) -> Result<Self, Failure> {
        let io = |path: &Path, e: &std::io::Error| {
            Failure::from(Error::from_io("mkdir", e, path.display().to_string()))
        };
        match keep {
            Some(path) if path.exists() => Err(Failure::usage(format!(
                "--keep {}: already exists; name a new directory",
                path.display()
            ))),
            Some(path) => {
                std::fs::create_dir_all(path).map_err(|e| io(path, &e))?;
                Ok(Self { path: path.to_owned(), temporary: None })
            }
            None => {
                let parent = std::env::temp_dir();
                let made = tempfile::Builder::new().prefix("flashboot-demo-").tempdir_in(&parent);
                let temporary = made.map_err(|e| io(&parent, &e))?;
                Ok(Self { path: temporary.path().to_owned(), temporary: Some(temporary) })
            }
        }
    }

    /// The directory, if it stays.
    fn keep(self) -> Option<PathBuf> {
        match self.temporary {
            Some(_) => None,
            None => Some(self.path),
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
