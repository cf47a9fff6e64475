//! Functions of the driver that flashboot does not use. Calling one aborts with its name.

use crate::loud;

macro_rules! stubs {
    ($($name:ident)*) => {
        $(
            /// Not simulated.
            // SAFETY: the name is the driver's, which this library stands in for. It takes no arguments that it
            // looks at, and does not return.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the driver's name")]
            pub(crate) extern "C" fn $name() -> u32 {
                loud::stop(concat!(stringify!($name), " is not simulated"))
            }
        )*
    };
}

stubs! {
    cuArray3DCreate_v2 cuArrayCreate_v2 cuArrayDestroy cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4
    cuCtxDestroy_v2 cuCtxDisablePeerAccess cuCtxEnablePeerAccess cuCtxGetApiVersion cuCtxGetCurrent
    cuCtxGetDevice cuCtxGetFlags cuCtxGetLimit cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange
    cuCtxResetPersistingL2Cache cuCtxSetCurrent cuCtxSetLimit cuDestroyExternalMemory
    cuDestroyExternalSemaphore cuDeviceComputeCapability cuDeviceGetByPCIBusId cuDeviceGetDefaultMemPool
    cuDeviceGetLuid cuDeviceGetMemPool cuDeviceGetP2PAttribute cuDeviceGetProperties cuDeviceGetUuid
    cuDevicePrimaryCtxGetState cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxSetFlags_v2 cuDeviceSetMemPool
    cuEventElapsedTime_v2 cuEventRecordWithFlags cuExternalMemoryGetMappedBuffer
    cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cuGetErrorName cuGetErrorString cuGetExportTable
    cuGetProcAddress cuGetProcAddress_v2 cuGraphCreate cuGraphDestroy cuGraphExecDestroy
    cuGraphInstantiateWithFlags cuGraphLaunch cuImportExternalMemory cuIpcCloseMemHandle cuIpcGetEventHandle
    cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle_v2 cuLaunchCooperativeKernel cuLaunchHostFunc
    cuLaunchKernelEx cuLibraryLoadData cuLibraryUnload cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2
    cuLinkDestroy cuMemAdvise cuMemAllocAsync cuMemAllocFromPoolAsync cuMemAllocHost_v2 cuMemAllocManaged
    cuMemAllocPitch_v2 cuMemAlloc_v2 cuMemBatchDecompressAsync cuMemFreeAsync cuMemFree_v2 cuMemGetAccess
    cuMemGetAddressRange_v2 cuMemGetAllocationPropertiesFromHandle cuMemHostGetDevicePointer_v2
    cuMemHostGetFlags cuMemMapArrayAsync cuMemPoolCreate cuMemPoolDestroy cuMemPoolSetAttribute cuMemPoolTrimTo
    cuMemPrefetchAsync cuMemRetainAllocationHandle cuMemcpy cuMemcpy2DAsync_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2
    cuMemcpy3D_v2 cuMemcpyAsync cuMemcpyBatchAsync cuMemcpyDtoD_v2 cuMemcpyDtoH_v2 cuMemcpyHtoD_v2 cuMemcpyPeer
    cuMemcpyPeerAsync cuMemsetD16Async cuMemsetD16_v2 cuMemsetD2D8_v2 cuMemsetD32Async cuMemsetD32_v2
    cuMemsetD8_v2 cuModuleGetGlobal_v2 cuModuleGetLoadingMode cuModuleLoad cuModuleLoadDataEx
    cuModuleLoadFatBinary cuMulticastAddDevice cuMulticastBindAddr cuMulticastBindMem cuMulticastCreate
    cuMulticastGetGranularity cuMulticastUnbind cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuPointerGetAttribute cuPointerGetAttributes cuPointerSetAttribute cuProfilerStart cuProfilerStop
    cuStreamAddCallback cuStreamAttachMemAsync cuStreamBatchMemOp_v2 cuStreamBeginCapture_v2
    cuStreamCreateWithPriority cuStreamEndCapture cuStreamGetCtx cuStreamGetFlags cuStreamGetPriority
    cuStreamIsCapturing cuStreamQuery cuStreamWaitValue32_v2 cuStreamWaitValue64_v2 cuStreamWriteValue32_v2
    cuStreamWriteValue64_v2 cuTexObjectCreate cuTexObjectDestroy cuThreadExchangeStreamCaptureMode
}
