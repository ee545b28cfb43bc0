// Stands in for @grafana/runtime, of which only links to traces would need anything.
export const getDataSourceSrv = () => ({ getInstanceSettings: () => undefined });
