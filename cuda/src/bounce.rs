//! Two pinned buffers and a stream, through which ordinary host memory and an arena exchange bytes.
//!
//! While one buffer is copied by the GPU, the other is filled or emptied by the host.

use crate::{
    Context,
    api::DevicePtr,
    host::Pinned,
    ops::Ops,
    stream::{Event, Stream},
};
use flashboot_core::Result;
use std::time::Duration;

/// How long a copy is asked after before the thread sleeps: most small copies are done by then.
const SPIN: Duration = Duration::from_micros(20);

#[derive(Debug)]
pub(crate) struct Bounce {
    context: Context,
    stream: Stream,
    half: usize,
    even: Half,
    odd: Half,
}

#[derive(Debug)]
struct Half {
    buffer: Pinned,
    /// Recorded after the buffer's last copy.
    passed: Event,
}

impl Half {
    fn new(context: &Context, bytes: usize) -> Result<Self> {
        Ok(Self { buffer: Pinned::new(context, bytes)?, passed: Event::new(context)? })
    }
}

impl Bounce {
    /// Two buffers of `half` bytes.
    pub(crate) fn new(context: &Context, half: usize) -> Result<Self> {
        Ok(Self {
            context: context.clone(),
            stream: Stream::new(context)?,
            half: half.max(1),
            even: Half::new(context, half)?,
            odd: Half::new(context, half)?,
        })
    }

    fn of(&self, part: u64) -> &Half {
        if part.is_multiple_of(2) { &self.even } else { &self.odd }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Copies `from` to device memory at `to`.
    ///
    /// # Safety
    /// `from.len()` bytes from `to` on stay mapped during the call, and nobody else writes them.
    pub(crate) unsafe fn upload(&mut self, to: DevicePtr, from: &[u8]) -> Result<()> {
        let mut at = to;
        let mut queue = || {
            for (number, part) in from.chunks(self.half).enumerate() {
                let half = if number % 2 == 0 { &mut self.even } else { &mut self.odd };
                let Half { buffer, passed } = half;
                if number >= 2 {
                    passed.wait(SPIN)?;
                }
                if let Some(to) = buffer.as_mut_slice().get_mut(..part.len()) {
                    to.copy_from_slice(part);
                }
                self.context.call(|ops| {
                    // SAFETY: the caller's promise for the device's bytes; the buffer is not touched again before
                    // `passed`, or the synchronisation below.
                    unsafe { ops.copy_htod(at, buffer.as_ptr(), part.len() as u64, self.stream.object()) }?;
                    passed.record_with(ops, &self.stream)
                })?;
                at += part.len() as u64;
            }
            Ok(())
        };
        let queued = queue();
        let done = self.stream.synchronize();
        queued.and(done)
    }

    /// Hands `len` bytes of device memory at `from` to `each`, in order, in parts of `step` bytes (at most one
    /// buffer's; the last may be shorter).
    ///
    /// # Safety
    /// The bytes stay mapped during the call.
    pub(crate) unsafe fn download(
        &mut self,
        from: DevicePtr,
        len: u64,
        step: usize,
        mut each: impl FnMut(&[u8]),
    ) -> Result<()> {
        let step = step.clamp(1, self.half);
        let parts = len.div_ceil(step as u64);
        let size = |part: u64| (len - part * step as u64).min(step as u64);
        let queue = |part: u64| {
            let Half { buffer, passed } = self.of(part);
            self.context.call(|ops| {
                // SAFETY: the caller keeps the device's bytes mapped; `step` bytes fit in the buffer, whose last
                // part has been handed on, and which is not looked at before `passed`.
                unsafe {
                    ops.copy_dtoh(
                        buffer.as_ptr(),
                        from + part * step as u64,
                        size(part),
                        self.stream.object(),
                    )
                }?;
                passed.record_with(ops, &self.stream)
            })
        };
        let mut run = || {
            if parts > 0 {
                queue(0)?;
            }
            for part in 0..parts {
                if part + 1 < parts {
                    queue(part + 1)?;
                }
                let Half { buffer, passed } = self.of(part);
                passed.wait(SPIN)?;
                each(buffer.as_slice().get(..size(part) as usize).unwrap_or_default());
            }
            Ok(())
        };
        let result = run();
        // After a failure the other buffer may still be under way.
        result.and(self.stream.synchronize())
    }

    /// Sets `len` bytes of device memory at `at`.
    ///
    /// # Safety
    /// As for [`upload`](Self::upload).
    pub(crate) unsafe fn fill(&mut self, at: DevicePtr, len: u64, byte: u8) -> Result<()> {
        let set = |ops: &dyn Ops| {
            // SAFETY: the caller's promise.
            unsafe { ops.memset(at, byte, len, self.stream.object()) }
        };
        let queued = if len == 0 { Ok(()) } else { self.context.call(set) };
        queued.and(self.stream.synchronize())
    }
}
