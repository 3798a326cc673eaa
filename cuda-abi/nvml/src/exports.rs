//! Every name of `nvml.h` 13: supported functions, and functions that only exist.

/// Makes a management library of a crate: exports every function of `nvml.h` over the [`Library`](crate::Library) at `$library`,
/// a path that begins with `crate`. Functions without a row with arguments here exist because programs look them up; they return
/// `NVML_ERROR_NOT_SUPPORTED`.
#[macro_export]
macro_rules! nvml_library {
    ($library:path) => {
        $crate::nvml_library! { @served $library:
            fn nvmlInit();
            fn nvmlInit_v2();
            fn nvmlInitWithFlags(flags: u32);
            fn nvmlShutdown();
            fn nvmlSystemGetDriverVersion(version: Out<c_char>, length: u32);
            fn nvmlSystemGetNVMLVersion(version: Out<c_char>, length: u32);
            fn nvmlSystemGetCudaDriverVersion(version: Out<i32>);
            fn nvmlSystemGetCudaDriverVersion_v2(version: Out<i32>);
            fn nvmlSystemGetProcessName(pid: u32, name: Out<c_char>, length: u32);
            fn nvmlDeviceGetCount(count: Out<u32>);
            fn nvmlDeviceGetCount_v2(count: Out<u32>);
            fn nvmlDeviceGetHandleByIndex(index: u32, device: Out<DeviceHandle>);
            fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: Out<DeviceHandle>);
            fn nvmlDeviceGetHandleByUUID(uuid: Text<'_>, device: Out<DeviceHandle>);
            fn nvmlDeviceGetHandleByPciBusId(bus_id: Text<'_>, device: Out<DeviceHandle>);
            fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: Text<'_>, device: Out<DeviceHandle>);
            fn nvmlDeviceGetName(device: DeviceHandle, name: Out<c_char>, length: u32);
            fn nvmlDeviceGetUUID(device: DeviceHandle, uuid: Out<c_char>, length: u32);
            fn nvmlDeviceGetIndex(device: DeviceHandle, index: Out<u32>);
            fn nvmlDeviceGetMinorNumber(device: DeviceHandle, minor: Out<u32>);
            fn nvmlDeviceGetPciInfo(device: DeviceHandle, info: Out<PciInfo>);
            fn nvmlDeviceGetPciInfo_v2(device: DeviceHandle, info: Out<PciInfo>);
            fn nvmlDeviceGetPciInfo_v3(device: DeviceHandle, info: Out<PciInfo>);
            fn nvmlDeviceGetBrand(device: DeviceHandle, brand: Out<u32>);
            fn nvmlDeviceGetArchitecture(device: DeviceHandle, architecture: Out<u32>);
            fn nvmlDeviceGetCudaComputeCapability(device: DeviceHandle, major: Out<i32>, minor: Out<i32>);
            fn nvmlDeviceGetNumGpuCores(device: DeviceHandle, cores: Out<u32>);
            fn nvmlDeviceGetMemoryBusWidth(device: DeviceHandle, bits: Out<u32>);
            fn nvmlDeviceGetComputeMode(device: DeviceHandle, mode: Out<u32>);
            fn nvmlDeviceGetDisplayMode(device: DeviceHandle, connected: Out<u32>);
            fn nvmlDeviceGetDisplayActive(device: DeviceHandle, active: Out<u32>);
            fn nvmlDeviceGetEccMode(device: DeviceHandle, current: Out<u32>, pending: Out<u32>);
            fn nvmlDeviceGetMigMode(device: DeviceHandle, current: Out<u32>, pending: Out<u32>);
            fn nvmlDeviceSetMigMode(device: DeviceHandle, mode: u32, activated: Out<u32>);
            fn nvmlDeviceGetMaxMigDeviceCount(device: DeviceHandle, count: Out<u32>);
            fn nvmlDeviceGetMigDeviceHandleByIndex(device: DeviceHandle, index: u32, instance: Out<DeviceHandle>);
            fn nvmlDeviceIsMigDeviceHandle(device: DeviceHandle, answer: Out<u32>);
            fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: DeviceHandle, parent: Out<DeviceHandle>);
            fn nvmlDeviceGetGpuInstanceId(device: DeviceHandle, id: Out<u32>);
            fn nvmlDeviceGetComputeInstanceId(device: DeviceHandle, id: Out<u32>);
            fn nvmlDeviceGetAttributes(device: DeviceHandle, attributes: Out<DeviceAttributes>);
            fn nvmlDeviceGetAttributes_v2(device: DeviceHandle, attributes: Out<DeviceAttributes>);
            fn nvmlDeviceGetGpuInstanceProfileInfo(device: DeviceHandle, profile: u32, info: Out<GpuInstanceProfileV1>);
            fn nvmlDeviceGetGpuInstanceProfileInfoV(device: DeviceHandle, profile: u32, info: Out<GpuInstanceProfileV2>);
            fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(device: DeviceHandle, profile: u32, info: Out<GpuInstanceProfileV2>);
            fn nvmlDeviceGetGpuInstancePossiblePlacements(device: DeviceHandle, profile: u32, list: Out<Placement>, count: Out<u32>);
            fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(device: DeviceHandle, profile: u32, list: Out<Placement>, count: Out<u32>);
            fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: DeviceHandle, profile: u32, count: Out<u32>);
            fn nvmlDeviceCreateGpuInstance(device: DeviceHandle, profile: u32, instance: Out<GpuInstanceHandle>);
            fn nvmlDeviceCreateGpuInstanceWithPlacement(device: DeviceHandle, profile: u32, placement: Out<Placement>, instance: Out<GpuInstanceHandle>);
            fn nvmlGpuInstanceDestroy(instance: GpuInstanceHandle);
            fn nvmlDeviceGetGpuInstances(device: DeviceHandle, profile: u32, list: Out<GpuInstanceHandle>, count: Out<u32>);
            fn nvmlDeviceGetGpuInstanceById(device: DeviceHandle, id: u32, instance: Out<GpuInstanceHandle>);
            fn nvmlGpuInstanceGetInfo(instance: GpuInstanceHandle, info: Out<GpuInstanceInfo>);
            fn nvmlGpuInstanceGetComputeInstanceProfileInfo(instance: GpuInstanceHandle, profile: u32, engines: u32, info: Out<ComputeInstanceProfileV1>);
            fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance: GpuInstanceHandle, profile: u32, engines: u32, info: Out<ComputeInstanceProfileV2>);
            fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance: GpuInstanceHandle, profile: u32, count: Out<u32>);
            fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance: GpuInstanceHandle, profile: u32, list: Out<Placement>, count: Out<u32>);
            fn nvmlGpuInstanceCreateComputeInstance(instance: GpuInstanceHandle, profile: u32, made: Out<ComputeInstanceHandle>);
            fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance: GpuInstanceHandle, profile: u32, placement: Out<Placement>, made: Out<ComputeInstanceHandle>);
            fn nvmlComputeInstanceDestroy(instance: ComputeInstanceHandle);
            fn nvmlGpuInstanceGetComputeInstances(instance: GpuInstanceHandle, profile: u32, list: Out<ComputeInstanceHandle>, count: Out<u32>);
            fn nvmlGpuInstanceGetComputeInstanceById(instance: GpuInstanceHandle, id: u32, found: Out<ComputeInstanceHandle>);
            fn nvmlComputeInstanceGetInfo(instance: ComputeInstanceHandle, info: Out<ComputeInstanceInfo>);
            fn nvmlComputeInstanceGetInfo_v2(instance: ComputeInstanceHandle, info: Out<ComputeInstanceInfo>);
            fn nvmlDeviceGetMemoryAffinity(device: DeviceHandle, words: u32, nodes: Out<u64>, scope: u32);
            fn nvmlDeviceGetTotalEccErrors(device: DeviceHandle, kind: u32, counter: u32, count: Out<u64>);
            fn nvmlDeviceGetRetiredPagesPendingStatus(device: DeviceHandle, pending: Out<u32>);
            fn nvmlDeviceGetRemappedRows(device: DeviceHandle, corrected: Out<u32>, uncorrected: Out<u32>, pending: Out<u32>, failed: Out<u32>);
            fn nvmlDeviceGetFieldValues(device: DeviceHandle, count: i32, values: Out<FieldValue>);
            fn nvmlDeviceGetGpuFabricInfo(device: DeviceHandle, info: Out<FabricInfo>);
            fn nvmlDeviceGetGpuFabricInfoV(device: DeviceHandle, info: Out<FabricInfoV2>);
            fn nvmlDeviceGetMemoryInfo(device: DeviceHandle, memory: Out<MemoryV1>);
            fn nvmlDeviceGetMemoryInfo_v2(device: DeviceHandle, memory: Out<MemoryV2>);
            fn nvmlDeviceGetComputeRunningProcesses(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV1>);
            fn nvmlDeviceGetComputeRunningProcesses_v2(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV2>);
            fn nvmlDeviceGetComputeRunningProcesses_v3(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV2>);
            fn nvmlDeviceGetGraphicsRunningProcesses(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV1>);
            fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV2>);
            fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV2>);
            fn nvmlDeviceGetMPSComputeRunningProcesses(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV1>);
            fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV2>);
            fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: DeviceHandle, count: Out<u32>, list: Out<ProcessInfoV2>);
            fn nvmlDeviceGetRunningProcessDetailList(device: DeviceHandle, list: Out<ProcessDetails>);
            fn nvmlDeviceGetUtilizationRates(device: DeviceHandle, utilization: Out<Utilization>);
            fn nvmlDeviceGetProcessUtilization(device: DeviceHandle, list: Out<ProcessSample>, count: Out<u32>, since: u64);
            fn nvmlDeviceGetSupportedEventTypes(device: DeviceHandle, kinds: Out<u64>);
            fn nvmlDeviceRegisterEvents(device: DeviceHandle, kinds: u64, set: EventSetHandle);
            fn nvmlEventSetCreate(set: Out<EventSetHandle>);
            fn nvmlEventSetFree(set: EventSetHandle);
            fn nvmlEventSetWait(set: EventSetHandle, event: Out<EventData>, milliseconds: u32);
            fn nvmlEventSetWait_v2(set: EventSetHandle, event: Out<EventData>, milliseconds: u32);
        }
        $crate::nvml_library! { @refused $library:
            nvmlDeviceClearAccountingPids nvmlDeviceClearCpuAffinity nvmlDeviceClearEccErrorCounts
            nvmlDeviceClearFieldValues nvmlDeviceDiscoverGpus nvmlDeviceFreezeNvLinkUtilizationCounter
            nvmlDeviceGetAPIRestriction nvmlDeviceGetAccountingBufferSize nvmlDeviceGetAccountingMode
            nvmlDeviceGetAccountingPids nvmlDeviceGetAccountingStats nvmlDeviceGetAccountingStats_v2
            nvmlDeviceGetActiveVgpus nvmlDeviceGetAdaptiveClockInfoStatus
            nvmlDeviceGetAdaptiveTgpModeInfo_v1 nvmlDeviceGetAddressingMode nvmlDeviceGetApplicationsClock
            nvmlDeviceGetAutoBoostedClocksEnabled nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetBBXTimeData_v1
            nvmlDeviceGetBankRemapperStatus_v1 nvmlDeviceGetBoardId nvmlDeviceGetBoardPartNumber
            nvmlDeviceGetBridgeChipInfo nvmlDeviceGetBusType nvmlDeviceGetC2cModeInfoV
            nvmlDeviceGetCapabilities nvmlDeviceGetClkMonStatus nvmlDeviceGetClock nvmlDeviceGetClockInfo
            nvmlDeviceGetClockOffsets nvmlDeviceGetConfComputeGpuAttestationReport
            nvmlDeviceGetConfComputeGpuCertificate nvmlDeviceGetConfComputeMemSizeInfo
            nvmlDeviceGetConfComputeProtectedMemoryUsage nvmlDeviceGetCoolerInfo nvmlDeviceGetCpuAffinity
            nvmlDeviceGetCpuAffinityWithinScope nvmlDeviceGetCreatableVgpus
            nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth
            nvmlDeviceGetCurrentClockFreqs nvmlDeviceGetCurrentClocksEventReasons
            nvmlDeviceGetCurrentClocksThrottleReasons nvmlDeviceGetDecoderUtilization
            nvmlDeviceGetDefaultApplicationsClock nvmlDeviceGetDefaultEccMode nvmlDeviceGetDetailedEccErrors
            nvmlDeviceGetDramEncryptionMode nvmlDeviceGetDriverModel nvmlDeviceGetDriverModel_v2
            nvmlDeviceGetDynamicPstatesInfo nvmlDeviceGetEncoderCapacity nvmlDeviceGetEncoderSessions
            nvmlDeviceGetEncoderStats nvmlDeviceGetEncoderUtilization nvmlDeviceGetEnforcedPowerLimit
            nvmlDeviceGetFBCSessions nvmlDeviceGetFBCStats nvmlDeviceGetFanControlPolicy_v2
            nvmlDeviceGetFanSpeed nvmlDeviceGetFanSpeedRPM nvmlDeviceGetFanSpeed_v2
            nvmlDeviceGetGpcClkMinMaxVfOffset nvmlDeviceGetGpcClkVfOffset
            nvmlDeviceGetGpuFabricInfo_v4 nvmlDeviceGetGpuMaxPcieLinkGeneration
            nvmlDeviceGetGpuOperationMode nvmlDeviceGetGridLicensableFeatures
            nvmlDeviceGetGridLicensableFeatures_v2 nvmlDeviceGetGridLicensableFeatures_v3
            nvmlDeviceGetGridLicensableFeatures_v4 nvmlDeviceGetGspFirmwareMode
            nvmlDeviceGetGspFirmwareVersion nvmlDeviceGetHandleBySerial nvmlDeviceGetHandleByUUIDV
            nvmlDeviceGetHostVgpuMode nvmlDeviceGetHostname_v1 nvmlDeviceGetInforomConfigurationChecksum
            nvmlDeviceGetInforomImageVersion nvmlDeviceGetInforomVersion nvmlDeviceGetIrqNum
            nvmlDeviceGetJpgUtilization nvmlDeviceGetLastBBXFlushTime nvmlDeviceGetMarginTemperature
            nvmlDeviceGetMaxClockInfo nvmlDeviceGetMaxCustomerBoostClock nvmlDeviceGetMaxPcieLinkGeneration
            nvmlDeviceGetMaxPcieLinkWidth nvmlDeviceGetMemClkMinMaxVfOffset nvmlDeviceGetMemClkVfOffset
            nvmlDeviceGetMemoryErrorCounter nvmlDeviceGetMemoryLimits_v1 nvmlDeviceGetMinMaxClockOfPState
            nvmlDeviceGetMinMaxFanSpeed nvmlDeviceGetModuleId nvmlDeviceGetMultiGpuBoard
            nvmlDeviceGetNumFans nvmlDeviceGetNumaNodeId nvmlDeviceGetNvLinkCapability
            nvmlDeviceGetNvLinkErrorCounter nvmlDeviceGetNvLinkInfo nvmlDeviceGetNvLinkRemoteDeviceType
            nvmlDeviceGetNvLinkRemotePciInfo nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetNvLinkState
            nvmlDeviceGetNvLinkTelemetrySamples_v1 nvmlDeviceGetNvLinkUtilizationControl
            nvmlDeviceGetNvLinkUtilizationCounter nvmlDeviceGetNvLinkVersion nvmlDeviceGetNvlinkBwMode
            nvmlDeviceGetNvlinkSupportedBwModes nvmlDeviceGetOfaUtilization nvmlDeviceGetP2PStatus
            nvmlDeviceGetPciInfoExt nvmlDeviceGetPcieLinkMaxSpeed nvmlDeviceGetPcieReplayCounter
            nvmlDeviceGetPcieSpeed nvmlDeviceGetPcieThroughput nvmlDeviceGetPdi
            nvmlDeviceGetPerformanceModes nvmlDeviceGetPerformanceState nvmlDeviceGetPersistenceMode
            nvmlDeviceGetPgpuMetadataString nvmlDeviceGetPlatformInfo
            nvmlDeviceGetPowerManagementDefaultLimit nvmlDeviceGetPowerManagementLimit
            nvmlDeviceGetPowerManagementLimitConstraints nvmlDeviceGetPowerManagementMode
            nvmlDeviceGetPowerMizerMode_v1 nvmlDeviceGetPowerSource nvmlDeviceGetPowerState
            nvmlDeviceGetPowerUsage nvmlDeviceGetProcessesUtilizationInfo nvmlDeviceGetRemappedRows_v2
            nvmlDeviceGetRepairStatus nvmlDeviceGetRetiredPages nvmlDeviceGetRetiredPages_v2
            nvmlDeviceGetRowRemapperHistogram nvmlDeviceGetSamples nvmlDeviceGetSerial
            nvmlDeviceGetSramEccErrorStatus nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts
            nvmlDeviceGetSupportedClocksEventReasons nvmlDeviceGetSupportedClocksThrottleReasons
            nvmlDeviceGetSupportedGraphicsClocks nvmlDeviceGetSupportedMemoryClocks
            nvmlDeviceGetSupportedPerformanceStates nvmlDeviceGetSupportedVgpus nvmlDeviceGetTargetFanSpeed
            nvmlDeviceGetTemperature nvmlDeviceGetTemperatureThreshold nvmlDeviceGetTemperatureV
            nvmlDeviceGetThermalSettings nvmlDeviceGetTopologyCommonAncestor
            nvmlDeviceGetTopologyNearestGpus nvmlDeviceGetTotalEnergyConsumption
            nvmlDeviceGetUnrepairableMemoryFlag_v1 nvmlDeviceGetVbiosVersion nvmlDeviceGetVgpuCapabilities
            nvmlDeviceGetVgpuHeterogeneousMode nvmlDeviceGetVgpuInstancesUtilizationInfo
            nvmlDeviceGetVgpuMetadata nvmlDeviceGetVgpuProcessUtilization
            nvmlDeviceGetVgpuProcessesUtilizationInfo nvmlDeviceGetVgpuSchedulerCapabilities
            nvmlDeviceGetVgpuSchedulerLog nvmlDeviceGetVgpuSchedulerLog_v2 nvmlDeviceGetVgpuSchedulerState
            nvmlDeviceGetVgpuSchedulerState_v2 nvmlDeviceGetVgpuTypeCreatablePlacements
            nvmlDeviceGetVgpuTypeSupportedPlacements nvmlDeviceGetVgpuUtilization
            nvmlDeviceGetViolationStatus nvmlDeviceGetVirtualizationMode nvmlDeviceModifyDrainState
            nvmlDeviceOnSameBoard nvmlDevicePerfMetricsGetSamples_v1
            nvmlDevicePowerSmoothingActivatePresetProfile nvmlDevicePowerSmoothingSetState
            nvmlDevicePowerSmoothingUpdatePresetProfileParam nvmlDeviceQueryDrainState
            nvmlDeviceReadPRMCounters_v1 nvmlDeviceReadWritePRM_v1 nvmlDeviceRemoveGpu
            nvmlDeviceRemoveGpu_v2 nvmlDeviceResetApplicationsClocks nvmlDeviceResetGpuLockedClocks
            nvmlDeviceResetMemoryLockedClocks nvmlDeviceResetNvLinkErrorCounters
            nvmlDeviceResetNvLinkUtilizationCounter nvmlDeviceSetAPIRestriction nvmlDeviceSetAccountingMode
            nvmlDeviceSetAdaptiveTgpMode_v1 nvmlDeviceSetApplicationsClocks
            nvmlDeviceSetAutoBoostedClocksEnabled nvmlDeviceSetClockOffsets nvmlDeviceSetComputeMode
            nvmlDeviceSetConfComputeUnprotectedMemSize nvmlDeviceSetCpuAffinity
            nvmlDeviceSetDefaultAutoBoostedClocksEnabled nvmlDeviceSetDefaultFanSpeed_v2
            nvmlDeviceSetDramEncryptionMode nvmlDeviceSetDriverModel nvmlDeviceSetEccMode
            nvmlDeviceSetFanControlPolicy nvmlDeviceSetFanSpeed_v2 nvmlDeviceSetGpcClkVfOffset
            nvmlDeviceSetGpuLockedClocks nvmlDeviceSetGpuOperationMode nvmlDeviceSetHostname_v1
            nvmlDeviceSetMemClkVfOffset nvmlDeviceSetMemoryLimits_v1 nvmlDeviceSetMemoryLockedClocks
            nvmlDeviceSetNvLinkDeviceLowPowerThreshold nvmlDeviceSetNvLinkUtilizationControl
            nvmlDeviceSetNvlinkBwMode nvmlDeviceSetNvlinkBwModeAsync_v1 nvmlDeviceSetPersistenceMode
            nvmlDeviceSetPowerManagementLimit nvmlDeviceSetPowerManagementLimit_v2
            nvmlDeviceSetPowerMizerMode_v1 nvmlDeviceSetRusdSettings_v1 nvmlDeviceSetTemperatureThreshold
            nvmlDeviceSetVgpuCapabilities nvmlDeviceSetVgpuHeterogeneousMode nvmlDeviceSetVgpuSchedulerState
            nvmlDeviceSetVgpuSchedulerState_v2 nvmlDeviceSetVirtualizationMode nvmlDeviceValidateInforom
            nvmlDeviceVgpuForceGspUnload nvmlDeviceWorkloadPowerProfileClearRequestedProfiles
            nvmlDeviceWorkloadPowerProfileGetCurrentProfiles nvmlDeviceWorkloadPowerProfileGetProfilesInfo
            nvmlDeviceWorkloadPowerProfileSetRequestedProfiles
            nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1 nvmlEventSetGetContextCount_v1
            nvmlEventSetGetContextData_v1 nvmlEventSetGetContextInfo_v1
            nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1
            nvmlEventSetRegisterGpuOperationalEvents_v1 nvmlEventSetWait_v3 nvmlGetExcludedDeviceCount
            nvmlGetExcludedDeviceInfoByIndex nvmlGetVgpuCompatibility nvmlGetVgpuDriverCapabilities
            nvmlGetVgpuVersion nvmlGpmMetricsGet nvmlGpmMigSampleGet nvmlGpmQueryDeviceSupport
            nvmlGpmQueryIfStreamingEnabled nvmlGpmSampleAlloc nvmlGpmSampleFree nvmlGpmSampleGet
            nvmlGpmSetStreamingEnabled nvmlGpuInstanceGetActiveVgpus nvmlGpuInstanceGetCreatableVgpus
            nvmlGpuInstanceGetVgpuHeterogeneousMode nvmlGpuInstanceGetVgpuSchedulerLog
            nvmlGpuInstanceGetVgpuSchedulerLog_v2 nvmlGpuInstanceGetVgpuSchedulerState
            nvmlGpuInstanceGetVgpuSchedulerState_v2 nvmlGpuInstanceGetVgpuTypeCreatablePlacements
            nvmlGpuInstanceSetVgpuHeterogeneousMode nvmlGpuInstanceSetVgpuSchedulerState
            nvmlGpuInstanceSetVgpuSchedulerState_v2 nvmlSetVgpuVersion nvmlSystemEventSetCreate
            nvmlSystemEventSetFree nvmlSystemEventSetWait nvmlSystemGetCPER_v1
            nvmlSystemGetConfComputeCapabilities nvmlSystemGetConfComputeGpusReadyState
            nvmlSystemGetConfComputeKeyRotationThresholdInfo nvmlSystemGetConfComputeSettings
            nvmlSystemGetConfComputeState nvmlSystemGetDriverBranch nvmlSystemGetHicVersion
            nvmlSystemGetNvlinkBwMode nvmlSystemGetTopologyGpuSet nvmlSystemRegisterEvents
            nvmlSystemSetConfComputeGpusReadyState nvmlSystemSetConfComputeKeyRotationThresholdInfo
            nvmlSystemSetNvlinkBwMode nvmlUnitGetCount nvmlUnitGetDevices nvmlUnitGetFanSpeedInfo
            nvmlUnitGetHandleByIndex nvmlUnitGetLedState nvmlUnitGetPsuInfo nvmlUnitGetTemperature
            nvmlUnitGetUnitInfo nvmlUnitSetLedState nvmlVgpuInstanceClearAccountingPids
            nvmlVgpuInstanceGetAccountingMode nvmlVgpuInstanceGetAccountingPids
            nvmlVgpuInstanceGetAccountingStats nvmlVgpuInstanceGetEccMode nvmlVgpuInstanceGetEncoderCapacity
            nvmlVgpuInstanceGetEncoderSessions nvmlVgpuInstanceGetEncoderStats
            nvmlVgpuInstanceGetFBCSessions nvmlVgpuInstanceGetFBCStats nvmlVgpuInstanceGetFbUsage
            nvmlVgpuInstanceGetFrameRateLimit nvmlVgpuInstanceGetGpuInstanceId nvmlVgpuInstanceGetGpuPciId
            nvmlVgpuInstanceGetLicenseInfo nvmlVgpuInstanceGetLicenseInfo_v2
            nvmlVgpuInstanceGetLicenseStatus nvmlVgpuInstanceGetMdevUUID nvmlVgpuInstanceGetMetadata
            nvmlVgpuInstanceGetPlacementId nvmlVgpuInstanceGetRuntimeStateSize nvmlVgpuInstanceGetType
            nvmlVgpuInstanceGetUUID nvmlVgpuInstanceGetVmDriverVersion nvmlVgpuInstanceGetVmID
            nvmlVgpuInstanceSetEncoderCapacity nvmlVgpuTypeGetBAR1Info nvmlVgpuTypeGetCapabilities
            nvmlVgpuTypeGetClass nvmlVgpuTypeGetDeviceID nvmlVgpuTypeGetFbReservation
            nvmlVgpuTypeGetFrameRateLimit nvmlVgpuTypeGetFramebufferSize nvmlVgpuTypeGetGpuInstanceProfileId
            nvmlVgpuTypeGetGspHeapSize nvmlVgpuTypeGetLicense nvmlVgpuTypeGetMaxInstances
            nvmlVgpuTypeGetMaxInstancesPerGpuInstance nvmlVgpuTypeGetMaxInstancesPerVm nvmlVgpuTypeGetName
            nvmlVgpuTypeGetNumDisplayHeads nvmlVgpuTypeGetResolution
        }
    };
    (@served $library:path: $(fn $name:ident($($argument:ident: $type:ty),*);)+) => {
        /// The supported functions.
        #[allow(non_snake_case, reason = "the names of nvml.h")]
        #[expect(unsafe_code, reason = "C exports")]
        mod nvml_served {
            use core::ffi::c_char;
            use $crate::{
                ComputeInstanceHandle, ComputeInstanceInfo, ComputeInstanceProfileV1, ComputeInstanceProfileV2,
                DeviceAttributes, DeviceHandle, EventData, EventSetHandle, FabricInfo, FabricInfoV2, FieldValue,
                GpuInstanceHandle, GpuInstanceInfo, GpuInstanceProfileV1, GpuInstanceProfileV2, MemoryV1,
                MemoryV2, Out, PciInfo, Placement, ProcessDetails, ProcessInfoV1, ProcessInfoV2, ProcessSample,
                Text, Utilization, entry,
            };
            $(
                #[unsafe(no_mangle)]
                extern "C" fn $name($($argument: $type),*) -> u32 {
                    $library.enter(stringify!($name), |library| entry::$name(library $(, $argument)*))
                }
            )+

            #[unsafe(no_mangle)]
            extern "C" fn nvmlErrorString(status: u32) -> *const c_char {
                $crate::Status::text(status).as_ptr()
            }
        }
    };
    (@refused $library:path: $($name:ident)+) => {
        /// The functions that only exist.
        #[allow(non_snake_case, reason = "the names of nvml.h")]
        #[expect(unsafe_code, reason = "C exports")]
        mod nvml_refused {
            $(
                #[unsafe(no_mangle)]
                extern "C" fn $name() -> u32 {
                    $library.enter(stringify!($name), $crate::entry::refused)
                }
            )+
        }
    };
}
