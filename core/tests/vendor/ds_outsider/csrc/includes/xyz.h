// What the vendor's sources share.
#pragma once

#ifndef XYZ_DEVICE
    #error "compile with -DXYZ_DEVICE"
#endif

#define XYZ_VENDOR "outsider"
