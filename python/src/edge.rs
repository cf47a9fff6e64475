//! The edge: memory that Python sees where it lies, by DLPack and by the buffer protocol, and Python's memory that is copied
//! from. All `unsafe` of this crate is here.
//!
//! What is shown is owned by a [`Region`], of which every capsule and buffer keeps one: memory goes when the last tensor that
//! sees it has gone, whatever became of the object it came from.

use flashboot::load::Seen;
use flashboot_checkpoint::TensorBytes;
use pyo3::{
    buffer::PyUntypedBuffer,
    exceptions::{PyBufferError, PyValueError},
    ffi,
    prelude::*,
};
use std::{
    any::Any,
    ffi::{CStr, c_int, c_void},
    ptr::NonNull,
    sync::Arc,
};

/// `kDLCPU` and `kDLCUDA` of DLPack.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// The name of a capsule that nobody has taken the tensor out of.
const NAME: &CStr = c"dltensor";

/// Bytes at an address, and what keeps them there.
#[derive(Clone)]
pub(crate) struct Region {
    address: usize,
    len: usize,
    device: Device,
    _owner: Arc<dyn Any + Send + Sync>,
}

/// DLPack's device: type and number.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device {
    kind: i32,
    number: i32,
}

impl Device {
    /// The host's memory.
    pub(crate) const HOST: Self = Self { kind: CPU, number: 0 };

    /// A GPU by its number in this process.
    pub(crate) fn gpu(number: usize) -> PyResult<Self> {
        let number = i32::try_from(number).map_err(|e| PyValueError::new_err(e.to_string()))?;
        Ok(Self { kind: CUDA, number })
    }

    /// As `__dlpack_device__` gives it.
    pub(crate) fn pair(self) -> (i32, i32) {
        (self.kind, self.number)
    }
}

impl Region {
    /// # Safety
    /// `len` bytes at `address` stay readable, and unwritten by this program, for as long as `owner` lives.
    unsafe fn new(address: usize, len: usize, device: Device, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, len, device, _owner: owner }
    }

    /// An arena whose filling has ended.
    pub(crate) fn of_arena(seen: Seen, len: u64) -> PyResult<Self> {
        let too_large = |e: std::num::TryFromIntError| PyValueError::new_err(e.to_string());
        let (address, len) =
            (seen.address().try_into().map_err(too_large)?, len.try_into().map_err(too_large)?);
        let device = match &seen {
            Seen::Host(_) | Seen::Attached(_) => Device::HOST,
            Seen::Gpu { number, .. } => Device::gpu(*number)?,
        };
        // SAFETY: what is seen stays mapped at one address until it is dropped, and nobody of this process writes it; seals keep
        // other processes from writing, and the owner of what is attached leaves a whole filling alone.
        Ok(unsafe { Self::new(address, len, device, Arc::new(seen)) })
    }

    /// One tensor's bytes in a slab that was filled.
    pub(crate) fn of_view(view: flashboot_loader::slab::View) -> Self {
        let (address, len) = (view.as_slice().as_ptr().addr(), view.as_slice().len());
        // SAFETY: a view keeps its slab, which stays where it is and is not filled again until the last view is dropped.
        unsafe { Self::new(address, len, Device::HOST, Arc::new(view)) }
    }

    /// Private memory.
    pub(crate) fn of_buffer(buffer: flashboot_memory::Buffer) -> Self {
        let (address, len) = (buffer.base().as_ptr().addr(), buffer.len());
        // SAFETY: a buffer's bytes stay mapped until it is dropped, and only its owner, which is the region now, names them.
        unsafe { Self::new(address, len, Device::HOST, Arc::new(buffer)) }
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// `DLDataType`.
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, and behind it what it points to.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    shape: [i64; 1],
    strides: [i64; 1],
    _region: Region,
}

/// A DLPack capsule of `region` as one-dimensional bytes.
pub(crate) fn capsule(py: Python<'_>, region: &Region) -> PyResult<Py<PyAny>> {
    let len = i64::try_from(region.len).map_err(|e| PyBufferError::new_err(e.to_string()))?;
    let mut managed = Box::new(Managed {
        tensor: Tensor {
            data: std::ptr::with_exposed_provenance_mut(region.address),
            device: region.device,
            dimensions: 1,
            dtype: DataType { code: 1, bits: 8, lanes: 1 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        },
        context: std::ptr::null_mut(),
        deleter: Some(delete),
        shape: [len],
        strides: [1],
        _region: region.clone(),
    });
    managed.tensor.shape = managed.shape.as_mut_ptr();
    managed.tensor.strides = managed.strides.as_mut_ptr();
    let managed = Box::into_raw(managed);
    // SAFETY: a live pointer, a static name, and a destructor that knows both; the interpreter is attached.
    let made = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(destroy)) };
    if made.is_null() {
        // SAFETY: nobody else has got the pointer.
        drop(unsafe { Box::from_raw(managed) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference that nobody else counts.
    Ok(unsafe { Bound::from_owned_ptr(py, made) }.unbind())
}

/// Called by who took the tensor, once, when it is not needed any more; from any thread, with or without the interpreter.
unsafe extern "C" fn delete(managed: *mut Managed) {
    if !managed.is_null() {
        // SAFETY: DLPack's contract is that the pointer is the one that was given out, and that this is called once.
        drop(unsafe { Box::from_raw(managed) });
    }
}

/// Called by the interpreter when the capsule goes: if nobody took the tensor, it is the capsule's to delete.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter gives a live capsule; one whose tensor was taken has been renamed.
    if unsafe { ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: valid, as was just asked.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()) };
    // SAFETY: ours, and not taken: nobody else deletes it.
    unsafe { delete(managed.cast()) };
}

/// Fills a buffer request with `region`'s bytes, read-only; `owner` is the object that keeps the region.
///
/// # Safety
/// `view` is what the interpreter gave to `__getbuffer__`.
pub(crate) unsafe fn fill_buffer(
    owner: &Bound<'_, PyAny>,
    region: &Region,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    if region.device != Device::HOST {
        return Err(PyBufferError::new_err("this memory is a GPU's: take it by DLPack"));
    }
    let len = ffi::Py_ssize_t::try_from(region.len).map_err(|e| PyBufferError::new_err(e.to_string()))?;
    let data: *mut c_void = std::ptr::with_exposed_provenance_mut(region.address);
    // SAFETY: the caller gives a view to be filled; the bytes stay as long as `owner`, of which the view gets a reference.
    let filled = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), data, len, 1, flags) };
    if filled != 0 { Err(PyErr::fetch(owner.py())) } else { Ok(()) }
}

/// Bytes of an object that has the buffer protocol, to be copied from.
pub(crate) struct Foreign {
    at: usize,
    len: usize,
    _buffer: PyUntypedBuffer,
}

impl Foreign {
    /// # Errors
    /// `BufferError` of what has no contiguous bytes.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the bytes of a tensor are to be contiguous"));
        }
        Ok(Self { at: buffer.buf_ptr().addr(), len: buffer.len_bytes(), _buffer: buffer })
    }
}

impl TensorBytes for Foreign {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn copy_out(&self, offset: u64, into: &mut [u8]) {
        let Ok(offset) = usize::try_from(offset) else { return };
        if offset.checked_add(into.len()).is_none_or(|end| end > self.len) {
            return;
        }
        let Some(at) =
            NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(self.at.wrapping_add(offset)))
        else {
            return;
        };
        // SAFETY: the range is inside the buffer, which its exporter keeps in place while it is held; bytes that Python writes
        // meanwhile are torn in the copy, which no reference sees; `into` is a slice of ours.
        unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), into.as_mut_ptr(), into.len()) };
    }
}
