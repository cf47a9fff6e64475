//! `File`: one safetensors file, read tensor by tensor or in parts of one. `Block`: the bytes that were read.

use crate::{
    arena::refuse_moves,
    edge::{self, Region},
    error::OrRaise as _,
    text,
};
use flashboot_checkpoint::{Checkpoint, Header, OpenOptions};
use flashboot_core::{Error, Kind, Result};
use flashboot_loader::io::{Io, IoConfig, Lane, SourceFile};
use flashboot_memory::Buffer;
use pyo3::{
    ffi,
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};
use std::{
    ffi::c_int,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// Below this a read takes no page of its own.
const HEADER_LENGTH: usize = 8;

/// One safetensors file, open. Nothing is mapped: a bad disk, or somebody who writes the file, is an error.
#[pyclass(frozen, module = "flashboot")]
pub(crate) struct File {
    checkpoint: Checkpoint,
    metadata: Vec<(String, String)>,
    data_start: u64,
    io: Io,
    file: SourceFile,
    /// Ways to read that nobody uses now.
    lanes: Mutex<Vec<Lane>>,
}

#[pymethods]
impl File {
    /// Opens the file and checks its header: every byte belongs to exactly one tensor.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| open(&path)).or_raise(py)
    }

    /// `__metadata__` of the header.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metadata = PyDict::new(py);
        for (key, value) in &self.metadata {
            metadata.set_item(key, value)?;
        }
        Ok(metadata)
    }

    /// Every tensor in the header's order, as tuples: name, dtype, shape, first byte of its data, bytes.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let all = self.checkpoint.tensors().iter().map(|t| {
            (t.name, t.dtype.name(), PyTuple::new(py, t.shape)?, t.begin, t.bytes).into_pyobject(py)
        });
        PyList::new(py, all.collect::<PyResult<Vec<_>>>()?)
    }

    /// Reads `bytes` bytes of the data from byte `begin` on.
    fn read(&self, py: Python<'_>, begin: u64, bytes: u64) -> PyResult<Block> {
        let data = self.checkpoint.data_bytes();
        if begin.checked_add(bytes).is_none_or(|end| end > data) {
            let why = format!("{bytes} bytes at {begin} are not within {data} bytes of data");
            return Err(text::invalid(py, "read", &why));
        }
        py.detach(|| self.fetch(begin, bytes)).or_raise(py)
    }
}

impl File {
    fn fetch(&self, begin: u64, bytes: u64) -> Result<Block> {
        let too_many =
            |_| Error::new(Kind::Exhausted, "read", format!("{bytes} bytes exceed the address space"));
        let mut buffer = Buffer::new(usize::try_from(bytes).map_err(too_many)?)?;
        if bytes > 0 {
            let lane = self.lanes.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut lane = lane.unwrap_or_else(|| self.io.lane());
            let at = self.data_start.saturating_add(begin);
            lane.read(&self.file, at, buffer.as_mut_slice(), &mut |_, _| Ok(()))?;
            // One whose read failed is not used again.
            self.lanes.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
            self.file.unchanged()?;
        }
        Ok(Block(Region::of_buffer(buffer)))
    }
}

fn open(path: &Path) -> Result<File> {
    let checkpoint = Checkpoint::open(path, &OpenOptions::default())?;
    let several =
        || Error::new(Kind::Invalid, "open", format!("{}: one safetensors file is needed", path.display()));
    let [shard] = checkpoint.shards() else { return Err(several()) };
    let (header_len, data_start) = (shard.header_len, shard.data_start());
    // The buffered way: a header is small, and mostly in the page cache.
    let io = Io::new(&IoConfig::default())?;
    let file = io.open(&shard.path)?;
    let mut header = vec![0; usize::try_from(header_len).unwrap_or(usize::MAX)];
    io.lane().read(&file, HEADER_LENGTH as u64, &mut header, &mut |_, _| Ok(()))?;
    let metadata = Header::parse(path, &header)?.metadata;
    Ok(File { checkpoint, metadata, data_start, io, file, lanes: Mutex::default() })
}

/// Bytes that were read, in memory of their own. Tensors that see them keep them.
#[pyclass(frozen, module = "flashboot")]
pub(crate) struct Block(Region);

impl Block {
    pub(crate) fn new(region: Region) -> Self {
        Self(region)
    }
}

#[pymethods]
impl Block {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Py<PyAny>>,
        max_version: Option<Py<PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let _ = (stream, max_version);
        refuse_moves(py, &self.0, dl_device, copy)?;
        edge::capsule(py, &self.0)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.0.device().pair()
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: the interpreter calls this slot with a view to be filled.
        unsafe { edge::fill_buffer(slf.as_any(), &slf.get().0, view, flags) }
    }
}
