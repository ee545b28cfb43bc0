# Every login shell of the node, and with it every job that its user starts:
#   install -m 0644 profile.sh /etc/profile.d/gpumem.sh
# A user who sets PYTHONPATH later should add to it: PYTHONPATH=/my/path:$PYTHONPATH
if [ -d /run/gpumem ]; then
    export PYTHONPATH="/run/gpumem/client${PYTHONPATH:+:$PYTHONPATH}"
fi
