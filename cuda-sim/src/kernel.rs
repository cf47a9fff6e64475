//! The one module: BLAKE3 of blocks of device memory, and a look at two words, done on the host as
//! `cuda/kernels/blake3.cu` says.
//!
//! What the kernel merely assumes of its launch is checked: a launch that would give wrong values aborts.

use crate::{
    abi::code,
    loud,
    pinned::HostRange,
    ptx,
    work::Action,
    work::{Place, Touch, Work, copy, read, write},
    world::{State, World, fresh, was_given},
};
use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use std::collections::BTreeMap;

const TILES: &str = "flashboot_blake3_tiles";
const BLOCKS: &str = "flashboot_blake3_blocks";
const LOOK: &str = "flashboot_look";
const CHUNK: u64 = 1024;
/// Chunks of a tile, and threads of a block of the first kernel.
const TILE: u64 = 256;
const MAX_TILES: u32 = 1024;
/// Bytes of a value.
const VALUE: usize = 32;
/// Bytes of a word that peers share.
const WORD: usize = 8;

/// Modules and functions.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    modules: BTreeMap<u64, Module>,
    functions: BTreeMap<u64, (u64, String)>,
}

#[derive(Debug)]
struct Module {
    context: usize,
    entries: Vec<String>,
}

/// Sizes of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
}

/// A launch, its addresses resolved.
#[derive(Debug)]
pub(crate) enum Kernel {
    Tiles { data: Place, len: u64, first: u64, unit: u64, root: bool, out: Place },
    Blocks { tiles: Place, total: u64, per_block: u64, root: bool, out: Place },
    Look { progress: Place, generation: Place, out: Place },
}

/// What a launch's arguments are, by the names in `blake3.cu`.
#[derive(Debug)]
pub(crate) enum Arguments {
    Tiles { data: u64, len: u64, first: u64, unit: u32, root: u32, out: u64 },
    Blocks { tiles: u64, total: u64, per_block: u32, root: u32, out: u64 },
    Look { progress: u64, generation: u64, out: u64 },
}

impl Modules {
    /// `cuModuleLoadData`.
    pub(crate) fn load(&mut self, world: &World, context: usize, text: &str) -> Result<u64, u32> {
        if world.config.no_kernel {
            return Err(code::NO_BINARY_FOR_GPU);
        }
        let entries = ptx::entries(text)?;
        if !entries.iter().any(|entry| entry == TILES) {
            loud::stop(&format!("a module of {entries:?}: only flashboot's hash kernel is simulated"));
        }
        let name = fresh();
        self.modules.insert(name, Module { context, entries });
        Ok(name)
    }

    /// Rows `module-null` and `module-unload-twice`.
    fn module(&self, name: u64) -> Result<&Module, u32> {
        if name != 0 && !was_given(name) {
            loud::stop(&format!("{name:#x} is no module"));
        }
        self.modules.get(&name).ok_or(code::INVALID_HANDLE)
    }

    /// Row `module-function-unknown`.
    pub(crate) fn function(&mut self, module: u64, name: &str) -> Result<u64, u32> {
        let found = self.module(module)?.entries.iter().any(|entry| entry == name);
        if name.is_empty() {
            return Err(code::INVALID_VALUE);
        }
        if !found {
            return Err(code::NOT_FOUND);
        }
        let function = fresh();
        self.functions.insert(function, (module, name.to_owned()));
        Ok(function)
    }

    /// Which kernel a function is (row `launch-null-function`).
    pub(crate) fn kernel(&self, function: u64) -> Result<(&str, u64), u32> {
        if function == 0 {
            return Err(code::INVALID_HANDLE);
        }
        match self.functions.get(&function) {
            Some((module, name)) if self.modules.contains_key(module) => Ok((name, *module)),
            _ => loud::stop(&format!("{function:#x} is no function, or one of a module that is unloaded")),
        }
    }

    /// The context is gone.
    pub(crate) fn forget(&mut self, context: usize) {
        self.modules.retain(|_, module| module.context != context);
    }
}

impl Arguments {
    /// The number of a kernel's parameters and whether each has 8 bytes, else 4.
    pub(crate) fn wide(kernel: &str) -> &'static [bool] {
        match kernel {
            TILES => &[true, true, true, false, false, true],
            BLOCKS => &[true, true, false, false, true],
            LOOK => &[true, true, true],
            other => loud::stop(&format!("the kernel {other} is not simulated")),
        }
    }

    /// From the values of the parameters.
    pub(crate) fn of(kernel: &str, values: &[u64]) -> Self {
        match (kernel, values) {
            (TILES, &[data, len, first, unit, root, out]) => {
                Self::Tiles { data, len, first, unit: unit as u32, root: root as u32, out }
            }
            (BLOCKS, &[tiles, total, per_block, root, out]) => {
                Self::Blocks { tiles, total, per_block: per_block as u32, root: root as u32, out }
            }
            (LOOK, &[progress, generation, out]) => Self::Look { progress, generation, out },
            _ => loud::stop(&format!("{} arguments for {kernel}", values.len())),
        }
    }
}

/// Row `launch-geometry`.
pub(crate) fn check_geometry(kernel: &str, geometry: Geometry) -> Result<(), u32> {
    let most = if kernel == TILES { TILE } else { u64::from(MAX_TILES / 2) };
    let threads: u64 = geometry.block.iter().map(|n| u64::from(*n)).product();
    if geometry.grid.contains(&0) || threads == 0 || threads > most || geometry.shared > 48 << 10 {
        return Err(code::INVALID_VALUE);
    }
    if geometry.grid.iter().chain(&geometry.block).filter(|n| **n != 1).count() > 2
        || geometry.grid.iter().skip(1).chain(geometry.block.iter().skip(1)).any(|n| *n != 1)
    {
        loud::stop(&format!("{kernel} launched over more than one dimension: {geometry:?}"));
    }
    Ok(())
}

fn must(holds: bool, what: &str, arguments: &Arguments, geometry: Geometry) {
    if !holds {
        loud::stop(&format!("a launch that gives wrong values ({what}): {arguments:?} {geometry:?}"));
    }
}

impl State {
    /// Stricter than row `module-unload-under-pending-kernel`.
    pub(crate) fn module_unload(&mut self, module: u64) -> Result<(), u32> {
        self.modules.module(module)?;
        if let Some(what) = self.streams.pending(&Touch::Module(module)) {
            loud::stop(&format!("cuModuleUnload while {what} is pending"));
        }
        self.modules.modules.remove(&module);
        Ok(())
    }

    /// A launch as work. Addresses that the device may not use fault when it runs (rows `poison`,
    /// `poison-kernel-writes-read-only`).
    pub(crate) fn launch(
        &self,
        context: usize,
        module: u64,
        arguments: &Arguments,
        geometry: Geometry,
    ) -> Work {
        check_launch(arguments, geometry);
        let (what, sides) = sides(arguments);
        let mut touches = vec![Touch::Module(module)];
        let mut places = Vec::new();
        for (at, size, write) in sides {
            let Some((place, needed)) = self.reachable(at, size, context, write) else {
                let action = Action::Fault(code::ILLEGAL_ADDRESS);
                return Work { what: what.into(), touches, action };
            };
            touches.extend(needed);
            places.push(place);
        }
        let action = match aligned(arguments) {
            Ok(()) => Action::Kernel(Kernel::at(arguments, &places)),
            Err(code) => Action::Fault(code),
        };
        Work { what: what.into(), touches, action }
    }
}

impl State {
    /// What a kernel may use: device memory, and pinned or registered memory of the host by its own address (rows
    /// `hash-to-pinned`, `look-to-pinned`, `look-to-registered`, `look-to-pageable`, `look-at-other-device`).
    fn reachable(&self, at: u64, size: usize, context: usize, write: bool) -> Option<(Place, Vec<Touch>)> {
        if size == 0 {
            return Some((Place(at as usize), Vec::new()));
        }
        if let Ok((place, touches)) = self.vmm.resolve(at, size, context, write) {
            return Some((place, touches.into()));
        }
        match self.pins.classify(at as usize, size, write) {
            Ok(HostRange::Pinned(place, touch)) => Some((place, vec![touch])),
            _ => None,
        }
    }
}

/// What the kernel takes for granted.
fn check_launch(arguments: &Arguments, geometry: Geometry) {
    let [grid, threads] = [geometry.grid, geometry.block].map(|sizes| sizes.iter().copied().max());
    let (grid, threads) = (u64::from(grid.unwrap_or(0)), threads.unwrap_or(0));
    let must = |holds, what| must(holds, what, arguments, geometry);
    match *arguments {
        Arguments::Tiles { len, first, unit, root, .. } => {
            must(u64::from(threads) == TILE, "a thread a chunk of a tile");
            must(grid == chunks(len).div_ceil(TILE), "a thread block a tile");
            must(unit.is_power_of_two() && u64::from(unit) <= TILE, "unit is a power of two up to a tile");
            must(first.is_multiple_of(unit.into()), "the range begins where a block does");
            must(root == 0 || first == 0, "a root is of a payload from its beginning");
        }
        Arguments::Blocks { total, per_block, root, .. } => {
            must((1..=MAX_TILES).contains(&per_block), "tiles of a block");
            must(threads >= (per_block / 2).max(8), "threads for every merge and word");
            must(grid == total.div_ceil(per_block.max(1).into()), "a thread block a block");
            must(root == 0 || grid == 1, "a root is of one block");
        }
        Arguments::Look { .. } => must(grid == 1 && threads == 1, "one thread"),
    }
}

fn chunks(len: u64) -> u64 {
    len.div_ceil(CHUNK).max(1)
}

/// The ranges read and written, in the order of the kernel's pointers.
fn sides(arguments: &Arguments) -> (&'static str, Vec<(u64, usize, bool)>) {
    match *arguments {
        Arguments::Tiles { data, len, unit, out, .. } => {
            let values = chunks(len).div_ceil(unit.into()) as usize;
            (TILES, vec![(data, len as usize, false), (out, values * VALUE, true)])
        }
        Arguments::Blocks { tiles, total, per_block, out, .. } => {
            let blocks = total.div_ceil(per_block.into()) as usize;
            (BLOCKS, vec![(tiles, total as usize * VALUE, false), (out, blocks * VALUE, true)])
        }
        Arguments::Look { progress, generation, out } => {
            (LOOK, vec![(progress, WORD, false), (generation, WORD, false), (out, 2 * WORD, true)])
        }
    }
}

/// Chunks are read 16 bytes at a time, values 4, words 8 (row `look-misaligned`).
fn aligned(arguments: &Arguments) -> Result<(), u32> {
    let fine = match *arguments {
        Arguments::Tiles { data, out, .. } => data.is_multiple_of(16) && out.is_multiple_of(4),
        Arguments::Blocks { tiles, out, .. } => tiles.is_multiple_of(4) && out.is_multiple_of(4),
        Arguments::Look { progress, generation, out } => {
            [progress, generation, out].iter().all(|at| at.is_multiple_of(WORD as u64))
        }
    };
    if fine { Ok(()) } else { Err(code::MISALIGNED_ADDRESS) }
}

impl Kernel {
    /// With its pointers resolved, in the order of [`sides`].
    fn at(arguments: &Arguments, places: &[Place]) -> Self {
        match (arguments, places) {
            (&Arguments::Tiles { len, first, unit, root, .. }, &[data, out]) => {
                Self::Tiles { data, len, first, unit: unit.into(), root: root != 0, out }
            }
            (&Arguments::Blocks { total, per_block, root, .. }, &[tiles, out]) => {
                Self::Blocks { tiles, total, per_block: per_block.into(), root: root != 0, out }
            }
            (Arguments::Look { .. }, &[progress, generation, out]) => {
                Self::Look { progress, generation, out }
            }
            _ => loud::stop("a kernel with another number of pointers"),
        }
    }

    /// Computes and writes the values.
    pub(crate) fn run(&self) {
        match *self {
            Self::Tiles { data, len, first, unit, root, out } => {
                let size = (unit * CHUNK) as usize;
                let whole = root && chunks(len) <= unit;
                let mut bytes = vec![0; size.min(len as usize)];
                for index in 0..chunks(len).div_ceil(unit) {
                    let offset = (index * unit * CHUNK) as usize;
                    bytes.truncate(size.min(len as usize - offset));
                    read(data, offset, &mut bytes);
                    let value = if whole {
                        *blake3::hash(&bytes).as_bytes()
                    } else {
                        let mut hasher = blake3::Hasher::new();
                        hasher.set_input_offset((first + index * unit) * CHUNK);
                        hasher.update(&bytes).finalize_non_root()
                    };
                    write(out, index as usize * VALUE, &value);
                }
            }
            Self::Blocks { tiles, total, per_block, root, out } => {
                for index in 0..total.div_ceil(per_block) {
                    let from = index * per_block;
                    let count = per_block.min(total - from);
                    let values = (from..from + count).map(|tile| {
                        let mut value = [0; VALUE];
                        read(tiles, tile as usize * VALUE, &mut value);
                        value
                    });
                    write(out, index as usize * VALUE, &merge(values.collect(), root));
                }
            }
            // Each an acquiring load, in this order.
            Self::Look { progress, generation, out } => {
                copy(progress, out, WORD);
                copy(generation, Place(out.0 + WORD), WORD);
            }
        }
    }
}

/// Neighbours merge until one is left; an odd one is carried up.
fn merge(mut values: Vec<[u8; VALUE]>, root: bool) -> [u8; VALUE] {
    while values.len() > 1 {
        let last = values.len() == 2;
        values = values
            .chunks(2)
            .map(|pair| match *pair {
                [left, right] if root && last => *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes(),
                [left, right] => merge_subtrees_non_root(&left, &right, Mode::Hash),
                ref odd => odd.first().copied().unwrap_or_default(),
            })
            .collect();
    }
    values.first().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place<T>(value: &mut T) -> Place {
        Place((&raw mut *value).expose_provenance())
    }

    #[test]
    fn a_look_gives_the_word_and_then_what_vouches_for_it() {
        let (mut progress, mut generation, mut out) = (7_u64, 9_u64, [0_u64; 2]);
        Kernel::Look {
            progress: place(&mut progress),
            generation: place(&mut generation),
            out: place(&mut out),
        }
        .run();
        assert_eq!(out, [7, 9]);
    }

    #[test]
    fn launches_of_wrong_sizes_and_alignment_are_refused_as_the_driver_does() {
        let geometry = |grid, block, shared| Geometry { grid: [grid, 1, 1], block: [block, 1, 1], shared };
        assert_eq!(check_geometry(TILES, geometry(1, 256, 0)), Ok(()));
        assert_eq!(check_geometry(TILES, geometry(1, 257, 0)), Err(code::INVALID_VALUE));
        assert_eq!(check_geometry(BLOCKS, geometry(1, 512, 0)), Ok(()));
        assert_eq!(check_geometry(TILES, geometry(1, 256, 1 << 20)), Err(code::INVALID_VALUE));
        let tiles = |data| Arguments::Tiles { data, len: 1, first: 0, unit: 256, root: 0, out: 4 };
        assert_eq!(aligned(&tiles(32)), Ok(()));
        assert_eq!(aligned(&tiles(8)), Err(code::MISALIGNED_ADDRESS));
        let look = Arguments::Look { progress: 8, generation: 12, out: 16 };
        assert_eq!(aligned(&look), Err(code::MISALIGNED_ADDRESS));
    }

    #[test]
    fn an_odd_value_is_carried_up_as_in_the_files_own_tree() {
        let payload: Vec<u8> = (0..5 * 1024).map(|i| (i % 251) as u8).collect();
        let values = payload.chunks(1024).enumerate().map(|(index, chunk)| {
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(index as u64 * CHUNK);
            hasher.update(chunk).finalize_non_root()
        });
        assert_eq!(merge(values.collect(), true), *blake3::hash(&payload).as_bytes());
    }
}
