//! Measures pack, verify and inspect against what bounds them, and prints one JSON object.
//!
//! `bench_checkpoint [--dir DIR] [--bytes N] [--tensors N] [--rounds N] [--workers N]`; medians, all in one run. Ratios above 1
//! are better for `pack_vs_cp` and `verify_vs_bound`, below 1 for `inspect_vs_serde_json`. The directory must be
//! on a real disk with three times N free. The binary runs itself again to measure memory.

mod measure;

use flashboot_checkpoint::{
    Checkpoint, Image, OpenOptions, PackOptions, VerifyOptions, inspect, pack, verify,
};
use measure::{Failure, fill, median, parse_plain, peak, print_peak, seconds, settle, shard_name};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

const SHARDS: u64 = 8;

struct Settings {
    dir: PathBuf,
    bytes: u64,
    tensors: u64,
    rounds: usize,
    workers: Option<usize>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench_checkpoint: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let mut settings =
        Settings { dir: std::env::temp_dir(), bytes: 2 << 30, tensors: 1_200_000, rounds: 5, workers: None };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--dir" => settings.dir = value.into(),
            "--bytes" => settings.bytes = value.parse()?,
            "--tensors" => settings.tensors = value.parse()?,
            "--rounds" => settings.rounds = value.parse()?,
            "--workers" => settings.workers = Some(value.parse()?),
            "--child" => return child(&value, &args.next().unwrap_or_default()),
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    let work = settings.dir.join(format!("flashboot-bench-{}", std::process::id()));
    std::fs::create_dir(&work)?;
    let measured = measure(&work, &settings);
    std::fs::remove_dir_all(&work)?;
    let measured = measured?;
    println!("{measured:#}");
    println!("{}", rows(&measured, &settings));
    Ok(())
}

/// The targets' rows, in the form that `cargo xtask bench` reads.
fn rows(measured: &serde_json::Value, settings: &Settings) -> serde_json::Value {
    let of = |name: &str| measured.get(name).and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
    let mib = |name: &str| of(name) / f64::from(1 << 20);
    let row = |name: &str, target: &str, measured: f64, ok: bool, how: String| {
        let measured = (measured * 1e3).round() / 1e3;
        serde_json::json!({ "name": name, "target": target, "measured": measured, "ok": ok, "how": how })
    };
    let rounds = settings.rounds;
    let at_least =
        |name: &str, measured: f64, how: String| row(name, "≥ 0.9", measured, measured >= 0.9, how);
    let at_most = |name: &str, most: f64, unit: &str, measured: f64, how: String| {
        row(name, &format!("≤ {most}{unit}"), measured, measured <= most, how)
    };
    let packed = format!("{:.2} GB of tensors, both with fsync, medians of {rounds}", of("pack_bytes") / 1e9);
    let direct = format!(
        "slower of O_DIRECT read {:.2} and BLAKE3 on all cores {:.2} GB/s, medians of {rounds}",
        of("direct_read_bytes_per_s") / 1e9,
        of("blake3_all_cores_bytes_per_s") / 1e9
    );
    let headers = format!(
        "{} tensors in {SHARDS} shards, {:.0} MB of headers",
        of("inspect_tensors"),
        of("inspect_header_bytes") / 1e6
    );
    serde_json::json!({ "rows": [
        at_least("pack ÷ cp --reflink=never", of("pack_vs_cp"), packed.clone()),
        at_most("pack, peak resident memory", 272.0, " MiB", mib("pack_peak_rss"), packed),
        at_most("pack, peak resident memory, many tensors", 272.0, " MiB", mib("pack_peak_rss_many_tensors"), headers.clone()),
        at_least("verify ÷ its bound", of("verify_vs_bound"), direct),
        at_most("inspect ÷ serde_json alone", 3.0, "", of("inspect_vs_serde_json"), headers.clone()),
        at_most("inspect, peak memory ÷ header bytes", 12.0, "", of("inspect_peak_over_header_bytes"), headers),
    ] })
}

fn measure(work: &Path, settings: &Settings) -> Result<serde_json::Value, Failure> {
    let mut found = serde_json::Map::new();
    pack_and_verify(work, settings, &mut found)?;
    inspecting(work, settings, &mut found)?;
    Ok(found.into())
}

fn child(what: &str, path: &str) -> Result<(), Failure> {
    let path = Path::new(path);
    match what {
        "nothing" => {}
        "inspect" => drop(inspect(path, &OpenOptions::default())?),
        "pack" => {
            let checkpoint = Checkpoint::open(path, &OpenOptions::default())?;
            let dest = path.with_extension("image");
            pack(&checkpoint, &dest, &PackOptions::default(), &())?;
            std::fs::remove_dir_all(dest)?;
        }
        other => return Err(format!("no child {other}").into()),
    }
    print_peak()
}

// Packing and verifying -------------------------------------------------------------------------------------

fn pack_and_verify(
    work: &Path,
    settings: &Settings,
    found: &mut serde_json::Map<String, serde_json::Value>,
) -> Result<(), Failure> {
    let model = work.join("model.safetensors");
    write_model(&model, settings.bytes)?;
    let checkpoint = Checkpoint::open(&model, &OpenOptions::default())?;
    let options = PackOptions { workers: settings.workers, ..PackOptions::default() };
    let (copy, image) = (work.join("copy"), work.join("image"));
    let (mut cp, mut packs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=settings.rounds {
        settle();
        let copied = measure::copy(&model, &copy)?;
        settle();
        let packed = seconds(|| Ok(pack(&checkpoint, &image, &options, &()).map(drop)?))?;
        if round < settings.rounds {
            std::fs::remove_dir_all(&image)?;
        }
        // The first round warms the source's pages for both.
        if round > 0 {
            cp.push(copied);
            packs.push(packed);
            ratios.push(copied / packed);
        }
    }
    let base = peak("nothing", &model)?;
    let pack_peak = peak("pack", &model)?;
    let bytes = checkpoint.data_bytes() as f64;
    found.insert("pack_bytes".into(), checkpoint.data_bytes().into());
    found.insert("pack_bytes_per_s".into(), (bytes / median(&mut packs)).into());
    found.insert("cp_bytes_per_s".into(), (bytes / median(&mut cp)).into());
    found.insert("pack_vs_cp".into(), median(&mut ratios).into());
    found.insert("pack_peak_rss".into(), pack_peak.into());
    found.insert("pack_peak_over_idle".into(), pack_peak.saturating_sub(base).into());
    verifying(&image, settings, found)?;
    std::fs::remove_dir_all(&image)?;
    std::fs::remove_file(&model)?;
    Ok(())
}

fn verifying(
    dir: &Path,
    settings: &Settings,
    found: &mut serde_json::Map<String, serde_json::Value>,
) -> Result<(), Failure> {
    let image = Image::open(dir)?;
    let rank = image.ranks().first().ok_or("no rank")?;
    let bytes = rank.payload_bytes as f64;
    let (mut reads, mut hashes, mut verifies, mut ratios) = (vec![], vec![], vec![], vec![]);
    for round in 0..=settings.rounds {
        settle();
        let read = seconds(|| read_direct(&rank.path, rank.payload_bytes))?;
        let hash = seconds(hash_on_all_cores)? * bytes / HASHED as f64;
        let verified = seconds(|| {
            let report = verify(&image, &VerifyOptions { workers: settings.workers }, &())?;
            if report.ok { Ok(()) } else { Err("the image is bad".into()) }
        })?;
        if round > 0 {
            reads.push(read);
            hashes.push(hash);
            verifies.push(verified);
            ratios.push(read.max(hash) / verified);
        }
    }
    found.insert("direct_read_bytes_per_s".into(), (bytes / median(&mut reads)).into());
    found.insert("blake3_all_cores_bytes_per_s".into(), (bytes / median(&mut hashes)).into());
    found.insert("verify_bytes_per_s".into(), (bytes / median(&mut verifies)).into());
    found.insert("verify_vs_bound".into(), median(&mut ratios).into());
    Ok(())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Reads the file with O_DIRECT, 16 MiB at a time, twice as many in flight as there are cores.
fn read_direct(path: &Path, len: u64) -> Result<(), Failure> {
    use rustix::fs::{Mode, OFlags};
    use std::os::unix::fs::FileExt as _;
    const PIECE: usize = 16 << 20;
    let file = File::from(rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())?);
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| -> Result<(), Failure> {
        let readers: Vec<_> = (0..cores() * 2)
            .map(|_| {
                scope.spawn(|| -> std::io::Result<()> {
                    let mut space = vec![0; PIECE + 4096];
                    let start = space.as_ptr().align_offset(4096);
                    loop {
                        let at = next.fetch_add(PIECE as u64, Ordering::Relaxed);
                        if at >= len {
                            return Ok(());
                        }
                        let now = usize::try_from(len - at).unwrap_or(PIECE).min(PIECE);
                        file.read_exact_at(space.get_mut(start..start + now).unwrap_or_default(), at)?;
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().map_err(|_| "a reader panicked")??;
        }
        Ok(())
    })
}

const HASHED: u64 = 1 << 30;

/// Hashes 1 GiB in blocks of 16 MiB that each core has at hand.
fn hash_on_all_cores() -> Result<(), Failure> {
    let share = HASHED / (16 << 20) / cores() as u64;
    std::thread::scope(|scope| {
        for _ in 0..cores() {
            scope.spawn(|| {
                let block = vec![7u8; 16 << 20];
                for _ in 0..share {
                    std::hint::black_box(blake3::hash(&block));
                }
            });
        }
    });
    Ok(())
}

/// One file of tensors of 90 KB to 3 MB and a few large ones, as a mixture-of-experts rank has them.
fn write_model(path: &Path, bytes: u64) -> Result<(), Failure> {
    let sizes = [2304 * 2560, 2304 * 160, 5120 * 1152, 5120 * 72];
    let mut tensors = Vec::new();
    let mut total = 0;
    'model: for layer in 0.. {
        for expert in 0..64 {
            for (i, size) in sizes.iter().enumerate() {
                if total >= bytes {
                    break 'model;
                }
                tensors.push((format!("layers.{layer}.ffn.experts.{expert}.w{i}.weight"), *size));
                total += size;
            }
        }
        tensors.push((format!("layers.{layer}.attn.weight"), 31 << 20));
        total += 31 << 20;
    }
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let header = header(tensors.iter().map(|(name, size)| (name.as_str(), vec![*size], *size)));
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    fill(out.into_inner()?, total)
}

fn header<'a>(tensors: impl Iterator<Item = (&'a str, Vec<u64>, u64)>) -> String {
    use std::fmt::Write as _;
    let mut text = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut at = 0;
    for (name, shape, bytes) in tensors {
        let end = at + bytes;
        let _ = write!(
            text,
            ",\"{name}\":{{\"dtype\":\"I8\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
        );
        at = end;
    }
    text.push('}');
    text
}

// Inspecting ------------------------------------------------------------------------------------------------

fn inspecting(
    work: &Path,
    settings: &Settings,
    found: &mut serde_json::Map<String, serde_json::Value>,
) -> Result<(), Failure> {
    let dir = work.join("many");
    let header_bytes = write_many(&dir, settings.tensors)?;
    let files: Vec<PathBuf> = (0..SHARDS).map(|i| dir.join(shard_name(i, SHARDS))).collect();
    let (mut plain, mut ours, mut ratios) = (vec![], vec![], vec![]);
    for round in 0..=settings.rounds {
        let alone = seconds(|| {
            let mut parsed = Vec::new();
            for file in &files {
                let bytes = std::fs::read(file)?;
                let json = header_of(&bytes).ok_or("a header is cut")?;
                parsed.push(parse_plain(&without_metadata(json)?)?);
            }
            Ok(())
        })?;
        let inspected = seconds(|| {
            let report = inspect(&dir, &OpenOptions::default())?;
            if report.tensors == settings.tensors { Ok(()) } else { Err("tensors are missing".into()) }
        })?;
        if round > 0 {
            plain.push(alone);
            ours.push(inspected);
            ratios.push(inspected / alone);
        }
    }
    let idle = peak("nothing", &dir)?;
    let pack_peak = peak("pack", &dir)?;
    let peak = peak("inspect", &dir)?.saturating_sub(idle);
    found.insert("pack_peak_rss_many_tensors".into(), pack_peak.into());
    found.insert("inspect_tensors".into(), settings.tensors.into());
    found.insert("inspect_header_bytes".into(), header_bytes.into());
    found.insert("inspect_ms".into(), (median(&mut ours) * 1e3).into());
    found.insert("serde_json_ms".into(), (median(&mut plain) * 1e3).into());
    found.insert("inspect_vs_serde_json".into(), median(&mut ratios).into());
    found.insert("inspect_peak_bytes".into(), peak.into());
    found.insert("inspect_peak_over_header_bytes".into(), (peak as f64 / header_bytes as f64).into());
    Ok(())
}

fn header_of(bytes: &[u8]) -> Option<&[u8]> {
    let (prefix, rest) = bytes.split_first_chunk::<8>()?;
    rest.get(..usize::try_from(u64::from_le_bytes(*prefix)).ok()?)
}

/// The metadata has another form: taken off in front, as it is written first.
fn without_metadata(json: &[u8]) -> Result<String, Failure> {
    let json = std::str::from_utf8(json)?;
    let tensors = json.split_once("},").map_or(json, |(_, tensors)| tensors);
    Ok(format!("{{{tensors}"))
}

/// Shards of empty-handed tensors: real headers and an index, one byte of data a tensor.
fn write_many(dir: &Path, tensors: u64) -> Result<u64, Failure> {
    std::fs::create_dir(dir)?;
    let mut index = BufWriter::new(File::create(dir.join("model.safetensors.index.json"))?);
    write!(index, "{{\"metadata\":{{}},\"weight_map\":{{")?;
    let mut header_bytes = 0;
    for shard in 0..SHARDS {
        let (first, end) = (tensors * shard / SHARDS, tensors * (shard + 1) / SHARDS);
        let names: Vec<_> = (first..end)
            .map(|i| format!("model.layers.{}.mlp.experts.{}.w{}.weight", i / 12_288, i / 32 % 384, i % 32))
            .collect();
        for (i, name) in names.iter().enumerate() {
            let comma = if shard == 0 && i == 0 { "" } else { "," };
            write!(index, "{comma}\"{name}\":\"{}\"", shard_name(shard, SHARDS))?;
        }
        let text = header(names.iter().map(|name| (name.as_str(), vec![1, 1], 1)));
        header_bytes += text.len() as u64;
        let mut out = BufWriter::new(File::create(dir.join(shard_name(shard, SHARDS)))?);
        out.write_all(&(text.len() as u64).to_le_bytes())?;
        out.write_all(text.as_bytes())?;
        out.write_all(&vec![0; usize::try_from(end - first)?])?;
        out.flush()?;
    }
    write!(index, "}}}}")?;
    index.flush()?;
    Ok(header_bytes)
}
