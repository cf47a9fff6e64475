//! Measures plan, pack for many ranks and column splits against what bounds them; the last line is the targets' rows.
//!
//! `bench_layouts [--dir DIR] [--bytes N] [--tensors N] [--rounds N]`; medians, all in one run. The directory must be on a real
//! disk with four times N free. The binary runs itself again to measure memory.

mod measure;

use flashboot_checkpoint::{
    Checkpoint, CostOptions, LayoutOptions, OpenOptions, PackOptions, Parallel, Recipe, Slicing, pack,
    pack_ranks, plan,
};
use measure::{Failure, copy, fill, median, parse_plain, peak, print_peak, seconds, settle, shard_name};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const SHARDS: u64 = 48;
const CONFIG: &str = r#"{"model_type":"deepseek_v4","n_routed_experts":384}"#;

const COLUMNS: &str = r#"
family = "columns"
model_types = []
layers = "layers.*"
rules = [{ names = ["layers.*.ffn.experts.*.w2"], split = "row" }]
"#;

struct Settings {
    dir: PathBuf,
    bytes: u64,
    tensors: u64,
    rounds: usize,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench_layouts: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let mut settings = Settings { dir: std::env::temp_dir(), bytes: 2 << 30, tensors: 100_000, rounds: 5 };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--dir" => settings.dir = value.into(),
            "--bytes" => settings.bytes = value.parse()?,
            "--tensors" => settings.tensors = value.parse()?,
            "--rounds" => settings.rounds = value.parse()?,
            "--child" => return child(Path::new(&args.next().unwrap_or_default())),
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    let work = settings.dir.join(format!("flashboot-bench-{}", std::process::id()));
    std::fs::create_dir(&work)?;
    let measured = measure(&work, &settings);
    std::fs::remove_dir_all(&work)?;
    println!("{}", measured?);
    Ok(())
}

/// The targets' rows, in the form that `cargo xtask bench` reads.
fn measure(work: &Path, settings: &Settings) -> Result<serde_json::Value, Failure> {
    let at_most = |name: &str, most: f64, unit: &str, measured: f64, how: String| {
        let measured = (measured * 1e3).round() / 1e3;
        serde_json::json!({ "name": name, "target": format!("≤ {most}{unit}"), "measured": measured, "ok": measured <= most, "how": how })
    };
    let (ratio, plain, how_many) = planning(work, settings)?;
    let planned = format!(
        "{how_many} tensors in {SHARDS} shards, tp 4; reading and parsing alone {:.1} ms",
        plain * 1e3
    );
    let (split, one, all) = packing(work, settings)?;
    let packed = format!(
        "{:.2} GB of experts and rest, {:.2} and {:.2} GB/s written",
        settings.bytes as f64 / 1e9,
        all / 1e9,
        one / 1e9
    );
    let peak = peak("pack", &work.join("model"))? as f64 / f64::from(1 << 20);
    std::fs::remove_dir_all(work.join("model"))?;
    let (columns, of) = columns(work, settings)?;
    let columns_how = format!(
        "{:.2} GB of [5120, 1152] weights over tp 8, cp --reflink=never and fsync {:.2} GB/s",
        settings.bytes as f64 / 1e9,
        of / 1e9
    );
    Ok(serde_json::json!({ "rows": [
        at_most("plan ÷ reading and parsing its headers", 2.0, "", ratio, planned),
        at_most("pack --tp 8 ÷ pack --tp 1, time per byte written", 1.15, "", split, packed.clone()),
        at_most("pack --tp 8, peak resident memory", 512.0, " MiB", peak, packed),
        at_most("column splits ÷ copying the same bytes", 1.1, "", columns, columns_how),
    ] }))
}

fn layout(tp: u32) -> LayoutOptions {
    let parallel = Parallel { tp, ..Parallel::default() };
    LayoutOptions { parallel, slicing: Some(Slicing::All), ..LayoutOptions::default() }
}

fn open(path: &Path) -> Result<Checkpoint, Failure> {
    Ok(Checkpoint::open(path, &OpenOptions::default())?)
}

// Planning ---------------------------------------------------------------------------------------------------

fn planning(work: &Path, settings: &Settings) -> Result<(f64, f64, u64), Failure> {
    let dir = work.join("many");
    std::fs::create_dir(&dir)?;
    std::fs::write(dir.join("config.json"), CONFIG)?;
    // Experts of real shapes, header-only: 384 a layer, six tensors each.
    let mut total = 0u64;
    let layers = settings.tensors.div_ceil(384 * 6);
    let per_shard = (layers * 384).div_ceil(SHARDS);
    for shard in 0..SHARDS {
        let mut header = Header::default();
        for i in shard * per_shard..(shard + 1) * per_shard {
            if i / 384 < layers {
                header.expert(&format!("layers.{}.ffn.experts.{}", i / 384, i % 384));
                total += 6;
            }
        }
        header.write(&dir.join(shard_name(shard, SHARDS)))?;
    }
    let files: Vec<PathBuf> = (0..SHARDS).map(|i| dir.join(shard_name(i, SHARDS))).collect();
    let (mut plain, mut ratios) = (vec![], vec![]);
    for round in 0..=settings.rounds {
        let alone = seconds(|| {
            for file in &files {
                use std::os::unix::fs::FileExt as _;
                let file = File::open(file)?;
                let mut prefix = [0; 8];
                file.read_exact_at(&mut prefix, 0)?;
                let mut json = vec![0; usize::try_from(u64::from_le_bytes(prefix))?];
                file.read_exact_at(&mut json, 8)?;
                std::hint::black_box(parse_plain(std::str::from_utf8(&json)?)?);
            }
            Ok(())
        })?;
        let planned = seconds(|| {
            let report = plan(&open(&dir)?, &layout(4), &CostOptions::default())?;
            if report.ranks.len() == 4 { Ok(()) } else { Err("ranks are missing".into()) }
        })?;
        if round > 0 {
            plain.push(alone);
            ratios.push(planned / alone);
        }
    }
    std::fs::remove_dir_all(dir)?;
    Ok((median(&mut ratios), median(&mut plain), total))
}

#[derive(Default)]
struct Header {
    text: String,
    at: u64,
}

impl Header {
    fn add(&mut self, name: &str, dtype: &str, shape: [u64; 2]) {
        let end = self.at + shape[0] * shape[1];
        let comma = if self.text.is_empty() { "{" } else { "," };
        let at = self.at;
        // Writing to a String cannot fail.
        let _ = write!(
            self.text,
            "{comma}\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
        );
        self.at = end;
    }

    fn expert(&mut self, name: &str) {
        for (w, rows, columns) in [("w1", 2304, 2560), ("w2", 5120, 1152), ("w3", 2304, 2560)] {
            self.add(&format!("{name}.{w}.scale"), "F8_E8M0", [rows, columns / 16]);
            self.add(&format!("{name}.{w}.weight"), "I8", [rows, columns]);
        }
    }

    /// Writes the header and as much room as its tensors need.
    fn write(self, path: &Path) -> Result<File, Failure> {
        let header = if self.text.is_empty() { "{}".to_owned() } else { self.text + "}" };
        let mut file = File::create(path)?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        file.set_len(8 + header.len() as u64 + self.at)?;
        Ok(file)
    }
}

// Packing ----------------------------------------------------------------------------------------------------

/// Time per byte written over eight ranks against one; and bytes per second of both.
fn packing(work: &Path, settings: &Settings) -> Result<(f64, f64, f64), Failure> {
    let dir = work.join("model");
    std::fs::create_dir(&dir)?;
    // Eight ranks need experts that eight divide, and nothing that all of them keep: what is whole is written eight times.
    std::fs::write(dir.join("config.json"), CONFIG.replace("384", "48"))?;
    let mut header = Header::default();
    for i in 0..settings.bytes / 18_800_640 / 48 * 48 {
        header.expert(&format!("layers.{}.ffn.experts.{}", i / 48, i % 48));
    }
    let bytes = header.at;
    fill(header.write(&dir.join("model.safetensors"))?, bytes)?;
    let checkpoint = open(&dir)?;
    let image = work.join("image");
    let (mut one, mut eight, mut ratios) = (vec![], vec![], vec![]);
    for round in 0..=settings.rounds {
        settle();
        let mut written = 0;
        let single = seconds(|| {
            written = pack(&checkpoint, &image, &PackOptions::default(), &())?.bytes;
            Ok(())
        })? / written as f64;
        std::fs::remove_dir_all(&image)?;
        settle();
        let split = seconds(|| {
            written = pack_ranks(&checkpoint, &image, &layout(8), &PackOptions::default(), &())?.report.bytes;
            Ok(())
        })? / written as f64;
        std::fs::remove_dir_all(&image)?;
        // The first round warms the source's pages for both.
        if round > 0 {
            one.push(1.0 / single);
            eight.push(1.0 / split);
            ratios.push(split / single);
        }
    }
    Ok((median(&mut ratios), median(&mut one), median(&mut eight)))
}

/// Column splits of nothing but `[5120, 1152]` weights against `cp`; and `cp`'s bytes per second.
fn columns(work: &Path, settings: &Settings) -> Result<(f64, f64), Failure> {
    let dir = work.join("columns");
    std::fs::create_dir(&dir)?;
    let experts = settings.bytes / (5120 * 1152);
    std::fs::write(dir.join("config.json"), CONFIG.replace("384", &experts.to_string()))?;
    let mut header = Header::default();
    (0..experts).for_each(|i| header.add(&format!("layers.0.ffn.experts.{i}.w2.weight"), "I8", [5120, 1152]));
    let bytes = header.at;
    let source = dir.join("model.safetensors");
    fill(header.write(&source)?, bytes)?;
    let checkpoint = open(&dir)?;
    // A model of nothing but down projections is none of the family: its recipe misses the others.
    let recipe = Recipe::parse("columns", COLUMNS)?;
    let layout = LayoutOptions { recipe: Some(recipe), experimental: true, ..layout(8) };
    let (image, copied_to) = (work.join("image"), work.join("copy"));
    let (mut rates, mut ratios) = (vec![], vec![]);
    for round in 0..=settings.rounds {
        settle();
        let copied = copy(&source, &copied_to)?;
        settle();
        let split =
            seconds(
                || Ok(pack_ranks(&checkpoint, &image, &layout, &PackOptions::default(), &()).map(drop)?),
            )?;
        std::fs::remove_dir_all(&image)?;
        if round > 0 {
            rates.push(bytes as f64 / copied);
            ratios.push(split / copied);
        }
    }
    Ok((median(&mut ratios), median(&mut rates)))
}

// Memory -----------------------------------------------------------------------------------------------------

fn child(model: &Path) -> Result<(), Failure> {
    let dest = model.with_extension("image");
    pack_ranks(&open(model)?, &dest, &layout(8), &PackOptions::default(), &())?;
    std::fs::remove_dir_all(dest)?;
    print_peak()
}
