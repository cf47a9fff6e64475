//! Tensors in memory → image: what an engine has made of a checkpoint, ties, views and strides included.
//!
//! The image is of one coordinate and any stage, on disk or in an arena ([`capture_into`]). Its one source is a safetensors file that never was, whose header names the
//! tensors in payload order, so that every reader of images reads these too.

use crate::blocks::Progress;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::image::{
    Coordinate, Engine, Fingerprint, ImageView, Kernel, LayoutInfo, Manifest, Metadata, RankEntry, RowFrom,
    SourceFile, Stage, TableOrigin, TableParts, TableRow, World, write_table,
};
use crate::pack::{
    PackOptions, PackReport, hash_payload, is_replaceable, sealed, write_hashed, write_metadata,
    write_payload,
};
use crate::staging::Staging;
use flashboot_core::layout::{Layout, Spec};
use flashboot_core::{Arena, ByteRange, Digests, Dtype};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// The name of the file that never was.
const FILE: &str = "captured.safetensors";

/// A tensor's bytes, wherever they are.
pub trait TensorBytes: Send + Sync {
    /// How many there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `offset` on; asked only for bytes that are there. Called from several threads.
    fn copy_out(&self, offset: u64, into: &mut [u8]);
}

impl TensorBytes for Vec<u8> {
    fn len(&self) -> u64 {
        self.as_slice().len() as u64
    }

    fn copy_out(&self, offset: u64, into: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(into.len());
        if let Some(bytes) = self.get(start..end) {
            into.copy_from_slice(bytes);
        }
    }
}

/// One tensor, contiguous.
pub struct CapturedTensor {
    /// Its name, unique among tensors, aliases and views.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its bytes, as many as dtype and shape say.
    pub bytes: Box<dyn TensorBytes>,
}

/// A view to be recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewView {
    /// Its name.
    pub name: String,
    /// The tensor whose bytes it sees.
    pub of: String,
    /// Its first byte, counted from the tensor's.
    pub offset: u64,
    /// Its element type, of whole bytes.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its strides in elements.
    pub stride: Vec<u64>,
}

/// Everything that is to be one image.
pub struct Captured {
    /// Every run of bytes, each once.
    pub tensors: Vec<CapturedTensor>,
    /// Further names of tensors: name and tensor.
    pub aliases: Vec<(String, String)>,
    /// Names of bytes seen otherwise.
    pub views: Vec<NewView>,
    /// Which part of the model they are, and of how many ranks.
    pub part: (Coordinate, World),
    /// What the bytes are good for.
    pub stage: Stage,
    /// Whose they are; of every stage but `sliced`.
    pub engine: Option<Engine>,
    /// What kernels they were laid out for; of `kernel-ready` only.
    pub kernel: Option<Kernel>,
    /// What the model's `config.json` says.
    pub config: ModelConfig,
}

/// Writes `captured` as an image to the directory `dest`, which appears whole or not at all.
///
/// Blocks until it is on the disk. Memory: workers × 4 MiB, and tables. What somebody writes into a tensor meanwhile may be in
/// the image in part; the image is sound in itself all the same.
///
/// # Errors
/// A name that is there twice, a tensor of another length than dtype and shape say, a view that leaves its tensor, a stage
/// that says too much or too little; those of packing.
pub fn capture(
    captured: &Captured,
    dest: &Path,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<PackReport> {
    let checked = Checked::new(captured, dest)?;
    let staging = Staging::begin(dest, options.replace.then_some(is_replaceable))?;
    let names = captured.tensors.len().saturating_add(captured.views.len()) as u64;
    let needed = checked.layout.payload().saturating_add(names.saturating_mul(1024)).saturating_add(1 << 20);
    staging.check_space(needed)?;
    let written = write_image(&staging, captured, &checked, options, progress);
    let metadata = written.map_err(|e| staging.explain(e, needed))?;
    staging.publish()?;
    Ok(PackReport {
        image: dest.into(),
        id: metadata.id.clone(),
        tensors: captured.tensors.len() as u64,
        bytes: checked.layout.payload(),
        separator: checked.layout.separator(),
        ranks: 1,
        root: metadata.ranks.first().map_or_else(String::new, |rank| rank.root.clone()),
        notes: Vec::new(),
    })
}

/// Writes `captured` into the arena that `make` makes for so many bytes of payload: an image that never was on a disk, whole, and
/// the manifest that proves it to others. The caller publishes it.
///
/// Blocks. Memory: the arena, workers × 4 MiB, and tables.
///
/// # Errors
/// As [`capture`]; those of `make` and of writing to the arena.
pub fn capture_into(
    captured: &Captured,
    make: impl FnOnce(u64) -> flashboot_core::Result<Arc<dyn Arena>>,
    workers: Option<usize>,
    progress: &dyn Progress,
) -> Result<(Arc<dyn Arena>, Manifest)> {
    let path = Path::new("memory");
    let checked = Checked::new(captured, path)?;
    let payload = checked.layout.payload();
    let arena = make(payload).map_err(Error::Memory)?;
    let fill = |piece, bytes: &mut [u8]| {
        checked.fill(captured, piece, bytes);
        Ok(())
    };
    let put = |piece: ByteRange, bytes: &[u8]| arena.copy_in(piece.start, bytes).map_err(Error::Memory);
    let options = PackOptions { workers, ..PackOptions::default() };
    let digests = hash_payload(path, payload, fill, put, &options, progress)?;
    let source = source(captured, &checked)?;
    let origin = TableOrigin::Memory(&source);
    let mut table = Vec::new();
    rows_to(path, &mut table, captured, &checked, origin, &digests)?;
    let named =
        Named { table_bytes: table.len() as u64, table_hash: blake3::hash(&table), digests: &digests };
    let (fingerprint, entry) = describe(captured, &checked, origin, &named)?;
    let numbers = captured.config.numbers.clone();
    let (metadata, sealed) = sealed(path, fingerprint, numbers, captured.part.1, entry)?;
    let bytes = [&(sealed.len() as u64).to_le_bytes()[..], &sealed, &table].concat();
    let manifest = Manifest::check(&bytes, &metadata.id, &captured.part.0.to_string())?;
    Ok((arena, manifest))
}

/// What was found sound before a byte is written.
struct Checked<'c> {
    layout: Layout,
    /// By name, each with its tensor's.
    aliases: Vec<(&'c str, &'c str)>,
    views: Vec<(ImageView, &'c str)>,
}

impl<'c> Checked<'c> {
    fn new(captured: &'c Captured, dest: &Path) -> Result<Self> {
        let not_image = |detail: String| Error::NotAnImage { path: dest.into(), detail };
        let (coordinate, world) = captured.part;
        if !world.has(coordinate) {
            let World { pp, tp, ep, dp, .. } = world;
            return Err(not_image(format!(
                "there is no rank {coordinate} where there are {pp} stages, {tp} tensor-parallel, {ep} expert-parallel and {dp} \
                 data-parallel ranks"
            )));
        }
        let mut names = BTreeSet::new();
        let own = captured.tensors.iter().map(|t| &t.name);
        let further = captured.aliases.iter().map(|(alias, _)| alias);
        for name in own.chain(further).chain(captured.views.iter().map(|view| &view.name)) {
            if !names.insert(name) {
                return Err(Error::Duplicate { file: dest.into(), tensor: name.clone() });
            }
        }
        let mut numbers = BTreeMap::new();
        for (number, tensor) in captured.tensors.iter().enumerate() {
            let CapturedTensor { name, dtype, shape, bytes } = tensor;
            let needed = dtype.bytes_of(shape).map_err(|e| not_image(format!("tensor `{name}`: {e}")))?;
            if needed != bytes.len() {
                let found = bytes.len();
                return Err(not_image(format!(
                    "tensor `{name}`: {found} bytes, its shape {shape:?} of {dtype} needs {needed}"
                )));
            }
            numbers.insert(name.as_str(), (number, needed));
        }
        let of = |name: &str, of: &str| {
            let found = numbers.get(of).copied();
            found.ok_or_else(|| not_image(format!("`{name}` means `{of}`, which is no tensor of it")))
        };
        let mut aliases = Vec::with_capacity(captured.aliases.len());
        for (alias, name) in &captured.aliases {
            of(alias, name)?;
            aliases.push((alias.as_str(), name.as_str()));
        }
        aliases.sort_unstable();
        let mut views = Vec::with_capacity(captured.views.len());
        for view in &captured.views {
            let (number, bytes) = of(&view.name, &view.of)?;
            let NewView { name, offset, dtype, shape, stride, .. } = view.clone();
            let made = ImageView { name, of: number, offset, dtype, shape, stride };
            made.check(bytes).map_err(|found| {
                not_image(format!("view `{}` of {bytes} bytes of `{}`: {found}", view.name, view.of))
            })?;
            views.push((made, view.of.as_str()));
        }
        views.sort_unstable_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        let spec = |number: usize| match captured.tensors.get(number) {
            Some(t) => Spec { name: &t.name, bytes: t.bytes.len(), place: crate::experts::place(&t.name) },
            None => Spec { name: "", bytes: 0, place: flashboot_core::layout::Place::NonExpert },
        };
        let layout = Layout::new(captured.tensors.len(), spec)?;
        fingerprint(captured, String::new()).check().map_err(|wrong| not_image(wrong.into()))?;
        Ok(Self { layout, aliases, views })
    }

    /// Tensors in payload order, each with its place in the payload and in the file that never was.
    fn rows<'t>(&'t self, captured: &'t Captured) -> impl Iterator<Item = (&'t CapturedTensor, u64, u64)> {
        let mut begin = 0u64;
        self.layout.order().filter_map(move |number| {
            let (tensor, offset) = (captured.tensors.get(number)?, self.layout.offset(number)?);
            let at = begin;
            begin = begin.saturating_add(tensor.bytes.len());
            Some((tensor, offset, at))
        })
    }

    /// Fills `bytes`, which are `range` of the payload; what no tensor owns is zero.
    fn fill(&self, captured: &Captured, range: ByteRange, bytes: &mut [u8]) {
        bytes.fill(0);
        let count = self.layout.order().len();
        let end = |position: usize| {
            let number = self.layout.at(position)?;
            let len = captured.tensors.get(number)?.bytes.len();
            self.layout.offset(number)?.checked_add(len)
        };
        // The first that ends past the range's start.
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            if end(middle).is_some_and(|end| end <= range.start) { low = middle + 1 } else { high = middle }
        }
        for number in (low..count).map_while(|position| self.layout.at(position)) {
            let (Some(tensor), Some(offset)) = (captured.tensors.get(number), self.layout.offset(number))
            else {
                continue;
            };
            if offset >= range.end {
                break;
            }
            let (from, to) =
                (offset.max(range.start), offset.saturating_add(tensor.bytes.len()).min(range.end));
            let index = |at: u64| usize::try_from(at.saturating_sub(range.start)).unwrap_or(usize::MAX);
            if let Some(part) = bytes.get_mut(index(from)..index(to)).filter(|part| !part.is_empty()) {
                tensor.bytes.copy_out(from.saturating_sub(offset), part);
            }
        }
    }
}

/// The header that a safetensors file of these tensors has, and that file's length without it.
fn source(captured: &Captured, checked: &Checked<'_>) -> Result<SourceFile> {
    #[derive(serde::Serialize)]
    struct Entry<'t> {
        dtype: Dtype,
        shape: &'t [u64],
        data_offsets: [u64; 2],
    }
    let not_json =
        |e: &dyn std::fmt::Display| Error::NotJson { file: Path::new(FILE).into(), detail: e.to_string() };
    let (mut header, mut data_bytes) = (String::from("{"), 0);
    for (tensor, _, begin) in checked.rows(captured) {
        let end = begin.saturating_add(tensor.bytes.len());
        if header.len() > 1 {
            header.push(',');
        }
        header.push_str(&serde_json::to_string(&tensor.name).map_err(|e| not_json(&e))?);
        header.push(':');
        let entry = Entry { dtype: tensor.dtype, shape: &tensor.shape, data_offsets: [begin, end] };
        header.push_str(&serde_json::to_string(&entry).map_err(|e| not_json(&e))?);
        data_bytes = end;
    }
    header.push('}');
    // As the format has it: the data begins at a multiple of eight.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    Ok(SourceFile { name: FILE.into(), data_bytes, header: header.into_bytes(), trailing: Vec::new() })
}

/// The layout's name, and how an engine of so many ranks cuts.
fn layout(world: World) -> String {
    let World { pp, tp, ep, dp, .. } = world;
    let name = LayoutInfo::NAME;
    if world == World::ONE { name.into() } else { format!("{name}/captured pp{pp} tp{tp} ep{ep} dp{dp}") }
}

fn fingerprint(captured: &Captured, source: String) -> Fingerprint {
    let mut totals = BTreeMap::<Dtype, u64>::new();
    for tensor in &captured.tensors {
        let total = totals.entry(tensor.dtype).or_default();
        *total = total.saturating_add(tensor.bytes.len());
    }
    // Of several with as many bytes, the first in the format's order.
    let main = totals.into_iter().rev().max_by_key(|&(_, bytes)| bytes);
    Fingerprint {
        source,
        layout: layout(captured.part.1),
        stage: captured.stage,
        dtype: main.map_or_else(String::new, |(dtype, _)| dtype.name().into()),
        quantisation: captured.config.quantisation.clone(),
        model_type: captured.config.model_type.clone(),
        engine: captured.engine.clone(),
        kernel: captured.kernel.clone(),
    }
}

fn write_image(
    staging: &Staging,
    captured: &Captured,
    checked: &Checked<'_>,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<Metadata> {
    let coordinate = captured.part.0;
    let fill = |piece, bytes: &mut [u8]| {
        checked.fill(captured, piece, bytes);
        Ok(())
    };
    let payload = staging.dir().join(format!("{coordinate}.img"));
    let digests = write_payload(&payload, checked.layout.payload(), fill, options, progress)?;
    let source = source(captured, checked)?;
    let origin = TableOrigin::Memory(&source);
    let table = staging.dir().join(format!("{coordinate}.json"));
    let (table_bytes, table_hash) =
        write_hashed(&table, |out| rows_to(&table, out, captured, checked, origin, &digests))?;
    let named = Named { table_bytes, table_hash, digests: &digests };
    let (fingerprint, entry) = describe(captured, checked, origin, &named)?;
    write_metadata(staging, fingerprint, captured.config.numbers.clone(), captured.part.1, entry)
}

/// What was written, by its hashes.
struct Named<'d> {
    table_bytes: u64,
    table_hash: blake3::Hash,
    digests: &'d Digests,
}

/// What the metadata says of an image of one rank.
fn describe(
    captured: &Captured,
    checked: &Checked<'_>,
    origin: TableOrigin<'_>,
    named: &Named<'_>,
) -> Result<(Fingerprint, RankEntry)> {
    let coordinate = captured.part.0;
    let root = blake3::Hash::from_bytes(named.digests.root());
    let fingerprint = fingerprint(captured, origin.hash(&[root])?.to_hex().to_string());
    let entry = RankEntry {
        coordinate,
        payload: format!("{coordinate}.img"),
        payload_bytes: checked.layout.payload(),
        root: root.to_hex().to_string(),
        table: format!("{coordinate}.json"),
        table_bytes: named.table_bytes,
        table_hash: named.table_hash.to_hex().to_string(),
    };
    Ok((fingerprint, entry))
}

/// Writes the table. `path` names it in errors.
fn rows_to(
    path: &Path,
    out: &mut impl Write,
    captured: &Captured,
    checked: &Checked<'_>,
    origin: TableOrigin<'_>,
    digests: &Digests,
) -> Result<()> {
    let views: Vec<_> = checked.views.iter().map(|(view, of)| (view, *of)).collect();
    let separator = checked.layout.separator();
    let parts = TableParts { origin, aliases: &checked.aliases, views: &views, separator, digests };
    write_table(path, out, &parts, |take| {
        for (tensor, offset, begin) in checked.rows(captured) {
            take(&TableRow {
                name: &tensor.name,
                place: crate::experts::place(&tensor.name),
                offset,
                shape: &tensor.shape,
                dtype: tensor.dtype,
                bytes: tensor.bytes.len(),
                from: RowFrom::Whole(0, begin),
            })?;
        }
        Ok(())
    })
}
